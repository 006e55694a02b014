import pytest
import torch

from qtk.nn.channel_clamp import ChannelClamp


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_every_channel_has_its_bounds(axis: int) -> None:
    x = torch.randn(4, 4, 4) * 3
    lower, upper = -torch.rand(4), torch.rand(4)
    clamped = ChannelClamp(axis)(x, lower, upper)
    for channel in range(4):
        expected = x.select(axis, channel).clamp(float(lower[channel]), float(upper[channel]))
        assert torch.equal(clamped.select(axis, channel), expected)


def test_a_bound_may_be_missing() -> None:
    x, bound = torch.randn(3, 2), torch.tensor([0.5, -0.5])
    assert torch.equal(ChannelClamp()(x, None, bound), torch.minimum(x, bound))
    assert torch.equal(ChannelClamp()(x, bound), torch.maximum(x, bound))
    assert ChannelClamp()(x, None) is x


def test_equal_bounds_are_a_clamp() -> None:
    x = torch.randn(2, 3, 5, 5) * 6
    assert torch.equal(ChannelClamp()(x, torch.zeros(3), torch.full((3,), 6.0)), torch.nn.functional.relu6(x))
