"""Rows that begin at any address, read as one stream: in Triton's interpreter, or compiled where a GPU is."""

import pytest
import torch

from qtk.numerics import affine
from tests.kernels import conformance
from tests.kernels.gpu import test_fake_quantize as gpu

row_streams = pytest.importorskip("qtk.kernels.gpu.row_streams")
tiling = pytest.importorskip("qtk.kernels.gpu.tiling")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # of the interpreter
    pytest.mark.skipif(torch.version.hip is not None, reason="tiles of rows are better there"),
]
with_residual = gpu.on_device(gpu.kernels.fake_quantize_with_residual)
SHAPES = {
    "short": (1031, 9), "odd": (83, 107), "no_tail": (128, 66), "a_tail_of_fifteen": (65, 127), "two_turns": (7, 1171),
    "even": (90, 100), "long": (2, 5003),
}
"""Tiles that end within rows, rows shorter and longer than a tile, totals that are and are no multiple of 16."""


def is_stream(shape, block_size=(1, -1)):
    return row_streams.is_row_stream(tiling.tiling_of(torch.zeros(shape), block_size))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("kind", conformance.KINDS, ids=str)
@pytest.mark.parametrize("zero_point", conformance.ZERO_POINTS, ids=str)
def test_every_element_has_the_scale_of_its_row(shape, kind, zero_point):
    assert is_stream(shape)
    scale, zero = conformance.ranges(shape, (1, -1), zero_point, -8, 7)
    x = conformance.values(shape, scale, kind)
    conformance.check_forward(gpu.forward, x, scale, zero, ((1, -1), -8, 7))


@pytest.mark.medium
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_the_gradient_without_sums(shape):
    scale, zero = conformance.ranges(shape, (1, -1), torch.int32, -8, 7)
    x, grad = conformance.values(shape, scale, torch.float32).nan_to_num(), torch.randn(shape)
    dx, *_ = gpu.backward(grad, x, scale, zero, (1, -1), -8, 7, False, False)
    summed, *_ = gpu.backward(grad, x, scale, zero, (1, -1), -8, 7, True, True)  # another kernel
    assert torch.equal(dx, summed)


@pytest.mark.medium
@pytest.mark.parametrize("learned", [False, True])
def test_the_residual(learned):
    shape = SHAPES["odd"]
    scale, zero = conformance.ranges(shape, (1, -1), torch.int32, -8, 7)
    x = conformance.values(shape, scale, torch.float32).nan_to_num()
    value, residual = with_residual(x, scale, zero, (1, -1), -8, 7, learned)
    parts = [with_residual(x[row], scale[row : row + 1], zero[row : row + 1], (), -8, 7, learned)
             for row in range(0, shape[0], 9)]
    for at, (own, own_residual) in zip(range(0, shape[0], 9), parts, strict=True):
        assert torch.equal(value[at], own)
        assert torch.equal(residual[at], own_residual)


def test_nothing_is_left_unwritten_nor_written_twice(monkeypatch):
    shape = SHAPES["a_tail_of_fifteen"]
    scale = torch.rand(shape[0]) + 0.5
    monkeypatch.setattr(torch, "empty_like", lambda x, **how: torch.full_like(x, float("nan"), **how))
    x = torch.randn(shape)
    assert torch.equal(gpu.forward(x, scale, None, (1, -1), -8, 7),
                       affine.fake_quantize(x, scale, None, (1, -1), -8, 7))


@pytest.mark.parametrize(("shape", "block_size"), [
    ((4096, 1024), (1, -1)),  # rows are aligned
    ((7, 131), (1, -1)),  # a tile or two hold it
    ((4096, 7), (1, -1)),  # a chunk may lie in three rows
    ((37, 1031), ()), ((64, 3, 7, 7), (-1, 1, -1, -1)), ((100, 120), (-1, 1)), ((100, 120), (1, 30)),
])
def test_other_tensors_are_tiled(shape, block_size):
    expected = block_size == (1, 30)  # blocks of the last axis are rows of a longer tensor
    assert is_stream(shape, block_size) == expected


def test_amd_tiles_rows(monkeypatch):
    monkeypatch.setattr(row_streams, "is_amd", lambda: True)
    assert not is_stream(SHAPES["odd"])
