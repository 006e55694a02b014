"""The CNN against its layers called by hand, batch norms folded, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtk.demo.models import build
from qtk.demo.small_cnn import SmallCnn


def conv_and_norm(conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor, *, stride: int = 1, groups: int = 1) -> Tensor:
    factor = norm.weight / (norm.running_var + norm.eps).sqrt()
    weight = conv.weight * factor[:, None, None, None]
    bias = norm.bias - norm.running_mean * factor
    return F.conv2d(x, weight, bias, stride=stride, padding=weight.shape[-1] // 2, groups=groups)


@torch.no_grad()
def test_residual_and_depthwise_blocks_in_turn_and_a_pooled_head() -> None:
    model = build("digits_cnn").double()
    assert isinstance(model, SmallCnn)
    x = images = torch.rand(3, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = conv_and_norm(model.stem[0], model.stem[1], x).relu()
    for index, stride in ((0, 2), (2, 1)):
        residual, separable = model.blocks[index], model.blocks[index + 1]
        y = conv_and_norm(residual.first[0], residual.first[1], x).relu()
        x = (x + conv_and_norm(residual.second, residual.norm, y)).relu()
        (depthwise, norm, _), (pointwise, other, _) = separable
        x = conv_and_norm(depthwise, norm, x, stride=stride, groups=x.shape[1]).relu()
        x = conv_and_norm(pointwise, other, x).relu()
    assert x.shape == (3, 64, 4, 4)
    torch.testing.assert_close(model(images), x.mean((2, 3)) @ model.head.weight.T + model.head.bias)
