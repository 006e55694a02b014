import pytest
import torch
from torch import nn

from qtk.nn.scale_shift import ScaleShift


@pytest.mark.parametrize(("shape", "axis"), [((2, 3, 4, 5), 1), ((2, 3), 1), ((2, 5, 3), -1)])
def test_each_channel_has_its_scale_and_shift(shape, axis):
    x, scale, shift = torch.randn(shape), torch.randn(3), torch.randn(3)
    moved = x.movedim(axis, -1) * scale + shift
    assert torch.equal(ScaleShift(axis)(x, scale, shift), moved.movedim(-1, axis))


def test_it_is_a_batch_norm_with_fixed_statistics():
    norm, x = nn.BatchNorm2d(3).double().eval(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    torch.testing.assert_close(ScaleShift()(x, scale, norm.bias - norm.running_mean * scale), norm(x))
