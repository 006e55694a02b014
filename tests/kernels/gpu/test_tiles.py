"""Rows that begin at any address, in tiles that begin 128 bits before; in Triton's interpreter, or on a GPU.

That elements have the scale of their row, in every layout, is shown by ``test_fake_quantize``.
"""

from contextlib import contextmanager

import pytest
import torch

from qtk.numerics import affine, straight_through
from qtk.numerics import candidate_errors as reference_of_errors
from qtk.numerics import dynamic as reference_of_dynamic
from qtk.numerics import extremes as reference_of_extremes
from qtk.numerics import statistics as reference_of_statistics
from tests.kernels import conformance
from tests.kernels.gpu import test_fake_quantize as gpu

row_streams = pytest.importorskip("qtk.kernels.gpu.row_streams")
candidate_errors = pytest.importorskip("qtk.kernels.gpu.candidate_errors")
dynamic = pytest.importorskip("qtk.kernels.gpu.fake_quantize_dynamic")
extremes = pytest.importorskip("qtk.kernels.gpu.extremes")
launch = pytest.importorskip("qtk.kernels.gpu.launch")
statistics = pytest.importorskip("qtk.kernels.gpu.statistics")
tiles = pytest.importorskip("qtk.kernels.gpu.tiles")
tiling = pytest.importorskip("qtk.kernels.gpu.tiling")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:(overflow|invalid):RuntimeWarning"),  # of the interpreter
]
CASES = {
    "rows": ((17, 197), (1, -1)), "several_tiles_a_row": ((3, 5003), (1, -1)), "blocks": ((6, 57), (1, 19)),
    "channels_of_images": ((4, 6, 7, 7), (-1, 1, -1, -1)), "shortest": ((33, 17), (1, -1)),
    "a_tile_more_where_it_begins_late": ((9, 255), (1, -1)), "a_tensor": ((19, 221), (-1, -1)),
}
KINDS = torch.float32, torch.bfloat16, torch.float16
cases = pytest.mark.parametrize(("shape", "block_size"), CASES.values(), ids=list(CASES))
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)


def amid(x, neighbour=float("nan")):
    """``x`` where what lies before and after it in memory is ``neighbour``."""
    memory = torch.full((x.numel() + 64,), neighbour, dtype=x.dtype, device=x.device)
    return memory[32:-32].view(x.shape).copy_(x)


def given(shape, block_size, kind):
    """A tensor, gradients, scales and zero points; the first and last element of each row is its largest."""
    scale, zero = conformance.ranges(shape, block_size, torch.int32, -8, 7)
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator).to(kind) for _ in range(2))
    x[..., 0], x[..., -1] = 7.5, -8.5
    return x, grad, scale, zero


@cases
@kinds
def test_the_cases_are_shifted(shape, block_size, kind):
    x = torch.zeros(shape, dtype=kind)
    tile = tiling.shifted(tiling.tiling_of(x, block_size), x)
    assert tile.shift * x.itemsize == 16
    assert not tile.is_aligned


@pytest.mark.medium
@cases
@kinds
@pytest.mark.parametrize("amd", [False, True])
def test_what_lies_before_and_after_is_neither_used_nor_written(shape, block_size, kind, amd, monkeypatch):
    for module in (tiles, tiling, row_streams):
        monkeypatch.setattr(module, "is_amd", lambda: amd)  # which reads all of these so
    monkeypatch.setattr(launch, "_REPEATABLE", {})  # launches of the other
    x, grad, scale, zero = given(shape, block_size, kind)
    spec = scale, zero, block_size, -8, 7
    expected = affine.fake_quantize(x, *spec), *gpu.backward(grad, x, *spec, True, True)
    with results_amid_others(monkeypatch) as made:
        value = gpu.forward(amid(x), *spec)
        gradients = gpu.backward(amid(grad), amid(x), *spec, True, True)
    assert all(torch.equal(a, b) for a, b in zip((value, *gradients), expected, strict=True))
    assert_nothing_beside_is_written(made)


@contextmanager
def results_amid_others(monkeypatch):
    """Tensors that ``empty_like`` makes in the body lie amid elements of 99."""
    made = []
    real = torch.empty_like

    def empty_like(like, **how):
        made.append(amid(real(like, **how).zero_(), 99))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", empty_like)
        yield made


def assert_nothing_beside_is_written(made):
    assert made
    for result in made:
        memory = result.as_strided((result.numel() + 64,), (1,), result.storage_offset() - 32)
        assert (memory[:32] == 99).all()
        assert (memory[-32:] == 99).all()


@cases
@kinds
def test_nor_where_ranges_are_found_at_the_same_time(shape, block_size, kind, monkeypatch):
    x, *_ = given(shape, block_size, kind)
    expected = reference_of_dynamic.fake_quantize(x, block_size, 0, 255, False)
    for neighbour in (float("nan"), float("inf"), float("-inf")):
        with results_amid_others(monkeypatch) as made:
            found = dynamic.fake_quantize_dynamic(amid(x, neighbour), block_size, 0, 255, False)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert_nothing_beside_is_written(made)


@pytest.mark.medium
@cases
@kinds
def test_extremes_and_errors_are_those_of_the_rows_alone(shape, block_size, kind):
    x, _, scale, _ = given(shape, block_size, kind)
    count, steps = scale.numel(), torch.stack([scale, 2 * scale]).reshape(2, -1)
    expected = reference_of_statistics.min_max(x, block_size)
    ends, counts = state(count)
    reference_of_extremes.add_extremes_(x, block_size, -8.0, 1, *ends, counts)
    of_steps = steps, None, block_size, -8, 7
    of_bins = torch.full((count,), -72.0), torch.full((count,), -3), 144, block_size
    counted = reference_of_statistics.histogram(x, *of_bins)
    exact = reference_of_errors.candidate_errors(x, *of_steps)
    for neighbour in (float("nan"), float("inf"), float("-inf")):
        among = amid(x, neighbour)
        found = statistics.min_max(among, block_size, count)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        own_ends, own_counts = state(count)
        extremes.add_extremes_(among, block_size, -8.0, 1, *own_ends, own_counts)
        assert all(torch.equal(a, b) for a, b in zip((*own_ends, own_counts), (*ends, counts), strict=True))
        assert torch.equal(statistics.histogram(among, *of_bins), counted)
        errors = candidate_errors.candidate_errors(among, *of_steps, True, None, 1.0)
        torch.testing.assert_close(errors, exact, rtol=1e-5, atol=0)  # float32 sums of a tile


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("shape", "block_size"),
    [((9000, 5), (-1, 1)), ((2, 20011), (1, -1)), ((40, 3, 997), (-1, 1, -1)), ((60007,), (-1,))],
)
def test_programs_that_share_scales_leave_their_results_in_memory_of_their_own(shape, block_size, monkeypatch):
    """Also where a tile has more scales than there are; one NaN among the last elements is found."""
    x, grad, scale, zero = given(shape, block_size, torch.float32)
    spec = scale, zero, block_size, -8, 7
    made = []
    real = torch.Tensor.new_empty

    def new_empty(like, size, **how):
        if size:
            made.append(amid(real(like, size, **how), 99))
        return made[-1] if size else real(like, size, **how)

    expected = straight_through.fake_quantize_backward(grad, x, *spec, wants_scale=True, wants_zero_point=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", new_empty)
        gradients = gpu.backward(grad, x, *spec, True, True)
        x.view(-1)[-1] = float("nan")
        ends = statistics.min_max(x, block_size, scale.numel())
        own_ends, own_counts = state(scale.numel())
        extremes.add_extremes_(x, block_size, -8.0, 1, *own_ends, own_counts)
    assert len(made) == 3
    assert torch.equal(gradients[0], expected[0])
    for found, exact in zip(gradients[1:], expected[1:], strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-3)  # float32 sums in another order
    known, counts = state(scale.numel())
    reference_of_extremes.add_extremes_(x, block_size, -8.0, 1, *known, counts)
    exact = *reference_of_statistics.min_max(x, block_size), *known, counts
    for found, wanted in zip((*ends, *own_ends, own_counts), exact, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert_nothing_beside_is_written(made)


def state(count):
    """Running minimum, maximum and counts of nothing."""
    return [torch.full((count,), end) for end in (float("inf"), float("-inf"))], torch.zeros(3, dtype=torch.int64)


def test_the_lanes_of_a_scale_are_what_a_thread_reads(monkeypatch):
    """So that a turn adds within threads: less than all lanes only where the compiler gives a thread 128 bits."""
    x, half = torch.zeros(64, 1024), torch.zeros(64, 1024, dtype=torch.bfloat16)
    rows, columns = tiling.tiling_of(x, (1, -1)), tiling.tiling_of(x, (-1, 1))
    assert (tiles.lanes(rows, x), tiles.lanes(rows, half), tiles.lanes(rows, x, half)) == (256, 128, 128)
    assert (tiles.lanes(columns, x), tiles.lanes(columns, half)) == (8, 16)
    odd = torch.zeros(64, 1001)
    assert tiles.lanes(tiling.tiling_of(odd, (1, -1)), odd) == 1024
    monkeypatch.setattr(tiles, "is_amd", lambda: True)  # twice the threads a warp
    assert (tiles.lanes(columns, x), tiles.lanes(columns, half)) == (16, 32)
