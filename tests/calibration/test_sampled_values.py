import pytest
import torch

from qtk.calibration.sampled_values import SAMPLE, some_values


@pytest.mark.parametrize("x", [
    torch.randn(8, 33, 40), torch.randn(8, 40, 33).transpose(1, 2), torch.randn(4, 33, 3, 40).permute(2, 0, 3, 1)[1],
    torch.randn(2, 3), torch.randn(8, 33, 40)[:, ::2], torch.randn(8, 1, 40).expand(8, 33, 40),
])
def test_values_are_spread_evenly_in_memory_also_of_a_part_of_a_tensor(x):
    order = sorted(range(x.ndim), key=x.stride, reverse=True)
    values = x.permute(order).flatten()
    assert torch.equal(some_values(x), values[:: max(x.numel() // SAMPLE, 1) | 1])
