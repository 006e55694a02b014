import pytest
import torch

from qtk.nn.channel_scale import ChannelScale


@pytest.mark.parametrize(("shape", "axis"), [((2, 3, 4), 1), ((2, 3, 4), -1), ((2, 3, 4), 0), ((5,), 0), ((0, 3), -1)])
def test_every_channel_times_its_number(shape, axis):
    x = torch.randn(shape)
    scale = torch.rand(shape[axis]) + 0.5
    expected = torch.stack([part * number for part, number in zip(x.unbind(axis), scale, strict=True)], axis)
    assert torch.equal(ChannelScale(axis)(x, scale), expected)


def test_gradients_reach_the_scale():
    scale = torch.ones(3, requires_grad=True)
    ChannelScale(1)(torch.full((2, 3), 4.0), scale).sum().backward()
    assert scale.grad.tolist() == [8.0, 8.0, 8.0]
