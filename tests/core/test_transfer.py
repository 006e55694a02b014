import pytest
import torch

from qtk.core.transfer import HOST, moved
from tests.pretend_gpu import pretended_gpu, to_gpu

TENSORS = (
    torch.tensor([1e-45, -3.4e38, torch.inf, -0.0]), torch.tensor(7, dtype=torch.int64), torch.tensor(True),
    torch.arange(6, dtype=torch.int32).reshape(2, 3), torch.tensor([0.1], dtype=torch.float64), torch.zeros(0, 3),
    torch.tensor([2**53 - 1, -(2**53)]), torch.tensor([1.5], dtype=torch.bfloat16), torch.arange(6.0).reshape(2, 3).t(),
)


def test_tensors_of_the_device_are_handed_on():
    assert all(one is other for one, other in zip(moved(TENSORS, HOST), TENSORS, strict=True))
    assert moved((), HOST) == []


def test_all_travel_in_one_copy_and_keep_value_shape_and_dtype(monkeypatch):
    pytest.importorskip("triton")
    with pretended_gpu(monkeypatch) as gpu:
        there = to_gpu(TENSORS)
        back = moved([TENSORS[0], *there], HOST)
        assert len(gpu.waits) == 1
        again = moved(back, there[0].device)
        assert len(gpu.waits) == 2
        assert {tensor.device.type for tensor in again} == {"cuda"}
    assert back[0] is TENSORS[0]
    for found in (back[1:], [tensor.host for tensor in again[1:]]):
        for tensor, expected in zip(found, TENSORS, strict=True):
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected)
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, "it keeps the memory of all"
    assert torch.signbit(back[1][3])
