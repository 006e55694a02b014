"""The Triton kernels, checked as ``extremes_conformance`` says: on a GPU, else in Triton's interpreter."""

import pytest
import torch

from qtk.errors import SpecError
from qtk.numerics import extremes as reference
from qtk.numerics.statistics import count_scales
from tests.kernels import extremes_conformance
from tests.kernels.extremes_conformance import BOUND, empty

kernels = pytest.importorskip("qtk.kernels.gpu.extremes")
# of Triton's interpreter
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def in_triton(x, block_size, bound, least, *state):
    on_device = [tensor.to(DEVICE) for tensor in state]
    kernels.add_extremes_(x.to(DEVICE), block_size, bound, least, *on_device)
    for tensor, result in zip(state, on_device, strict=True):
        tensor.copy_(result)


class TestTriton(extremes_conformance.Conformance):
    backend = "triton"
    add_extremes_ = staticmethod(in_triton)


@pytest.mark.kernels
def test_what_the_kernel_counts_with_is_zero_again(monkeypatch):
    tickets = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(kernels, "tickets", lambda device, count: tickets[:count])
    x = torch.randn(64, 300)
    x[3, 5:9], x[60, 1] = -torch.inf, torch.inf
    for block_size in ((), (1, -1), (-1, 1), (1, 30)):
        in_triton(x, block_size, BOUND, 1000, *empty(count_scales(x.shape, block_size)))
        assert not tickets.any()


def test_nothing_has_no_ends():
    with pytest.raises(SpecError, match="no extremes"):
        kernels.add_extremes_(torch.zeros(0, 3), (), BOUND, 0, *empty(1))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
def test_a_bound_is_rounded_to_the_kind_of_the_tensor(kind):
    """As torch compares; the numbers around it."""
    bound = max(BOUND, torch.finfo(kind).min)
    near = torch.tensor([bound], dtype=kind)
    steps = near.view(torch.int16 if kind.itemsize == 2 else torch.int32) + torch.arange(-2, 3).to(
        torch.int16 if kind.itemsize == 2 else torch.int32)
    x = steps.view(kind)
    expected, found = empty(1), empty(1)
    reference.add_extremes_(x, (), bound, 0, *expected)
    in_triton(x, (), bound, 0, *found)
    assert expected[2].tolist() == found[2].tolist()
    assert int(expected[2][1]) == int((x <= bound).sum())
