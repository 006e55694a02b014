"""The op as it runs here, and the launches: on a GPU, else in Triton's interpreter; against the op for one tensor."""

from itertools import chain

import pytest
import torch

from qtk.errors import SpecError
from qtk.ops import fake_quantize_many as op
from qtk.ops.fake_quantize import fake_quantize

kernels = pytest.importorskip("qtk.kernels.gpu.fake_quantize_many")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = (1, 1), (1, 5000), (7, 9), (3, 2048), (2, 3001), (64, 147), (5, 1)
"""Rows longer and shorter than what a program has, one element, columns of one element."""
CODES = (-8, 7), (0, 255), (-128, 127)


def problem(kind, shapes=SHAPES):
    """Matrices, scales, zero points, codes; every second matrix has zero points."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(kind) for shape in shapes]
    scales = [torch.rand(len(x), generator=generator) * 0.2 + 0.02 for x in inputs]
    zeros = [torch.randint(0, 8, (len(x),)).int() if index % 2 else None for index, x in enumerate(inputs)]
    return inputs, scales, zeros, [CODES[index % 3] for index in range(len(inputs))]


def one_by_one(inputs, scales, zeros, codes):
    return [fake_quantize(*each, (1, -1), *pair) for *each, pair in zip(inputs, scales, zeros, codes, strict=True)]


def launched(monkeypatch):
    """What the op does on a GPU, in the interpreter where there is none. Returns: the sizes of the launches."""
    sizes, run = [], kernels.run

    def counted(inputs, *rest):
        sizes.append(len(inputs))
        return run(inputs, *rest)

    monkeypatch.setattr(kernels, "run", counted)
    return sizes


def on_device(given):
    inputs, scales, zeros, codes = given
    none = torch.empty(0, dtype=torch.int32)
    moved = ([(none if each is None else each).to(DEVICE) for each in part] for part in (inputs, scales, zeros))
    return *moved, *(list(part) for part in zip(*codes, strict=True))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bit_for_bit_as_one_by_one_in_one_launch(kind, monkeypatch):
    given, sizes = problem(kind), launched(monkeypatch)
    found = op.in_launches(on_device(given))
    assert sizes == [len(SHAPES)]
    for own, other in zip(found, one_by_one(*given), strict=True):
        assert own.dtype is kind
        assert torch.equal(own.cpu(), other)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_bit_for_bit_as_one_by_one_in_one_launch(kind, monkeypatch):
    inputs, scales, zeros, codes = problem(kind)
    inputs = [x.requires_grad_() for x in inputs]
    grads = [torch.randn(x.shape).to(kind) for x in inputs]
    expected = torch.autograd.grad(one_by_one(inputs, scales, zeros, codes), inputs, grads)
    together = torch.autograd.grad(op.fake_quantize_many(inputs, scales, zeros, codes), inputs, grads)
    sizes = launched(monkeypatch)
    given = on_device(([x.detach() for x in inputs], scales, zeros, codes))
    in_launches = op.in_launches(given, [g.to(DEVICE) for g in grads])
    assert sizes == [len(SHAPES)]
    for found in (together, in_launches):
        for own, other in zip(found, expected, strict=True):
            assert torch.equal(own.cpu(), other)


def test_a_launch_a_dtype_and_one_by_one_what_the_kernel_cannot_take(monkeypatch):
    floats, halves, doubles = (problem(kind, SHAPES[:3]) for kind in (torch.float32, torch.float16, torch.float64))
    strided = problem(torch.float32, [(6, 10)])
    strided[0][0] = strided[0][0][:, ::2]
    given = [[*chain(*parts)] for parts in zip(halves, floats, doubles, strided, strict=True)]
    sizes = launched(monkeypatch)
    found = op.in_launches(on_device(given))
    assert sizes == [3, 3]
    for own, other in zip(found, one_by_one(*given), strict=True):
        assert torch.equal(own.cpu(), other)


def test_an_address_that_is_not_aligned_is_no_matter(monkeypatch):
    inputs, scales, zeros, codes = problem(torch.float32, [(3, 16), (3, 16)])
    inputs[0] = torch.cat([torch.zeros(1), inputs[0].flatten()])[1:].reshape(3, 16)
    sizes = launched(monkeypatch)
    found = op.in_launches(on_device((inputs, scales, zeros, codes)))
    assert sizes == ([1] if DEVICE == "cpu" else [2])  # a copy to a GPU is aligned
    for own, other in zip(found, one_by_one(inputs, scales, zeros, codes), strict=True):
        assert torch.equal(own.cpu(), other)


def test_on_the_cpu_it_is_the_op_for_one_tensor():
    for kind in (torch.float32, torch.float64):
        given = problem(kind)
        for own, other in zip(op.fake_quantize_many(*given), one_by_one(*given), strict=True):
            assert torch.equal(own, other)
    assert op.fake_quantize_many([], [], [], []) == []


def test_numbers_at_the_ends(monkeypatch):
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, -0.0, 1e38, 1e-45]])
    given = [x, x], [torch.tensor([0.1]), torch.tensor([0.0])], [None, None], [(-8, 7), (-8, 7)]
    for own, other in zip(op.in_launches(on_device(given)), one_by_one(*given), strict=True):
        torch.testing.assert_close(own.cpu(), other, rtol=0, atol=0, equal_nan=True)


def test_what_does_not_fit_is_refused():
    inputs, scales, zeros, codes = problem(torch.float32)
    with pytest.raises(SpecError, match="as many of each"):
        op.fake_quantize_many(inputs, scales[1:], zeros, codes)
    with pytest.raises(SpecError, match="one for each row of matrix 2"):
        op.fake_quantize_many(inputs, [*scales[:2], scales[2][:3], *scales[3:]], zeros, codes)
    with pytest.raises(SpecError, match="matrix 0"):
        op.fake_quantize_many([torch.ones(3)], [torch.ones(3)], [None], [(-8, 7)])


@pytest.mark.parametrize("trains", [False, True])
def test_what_pytorch_asks_of_an_op(trains):
    inputs, scales, zeros, codes = problem(torch.float32)
    inputs = [x.requires_grad_(trains) for x in inputs]
    torch.library.opcheck(torch.ops.qtk.fake_quantize_many.default, on_device((inputs, scales, zeros, codes)))
