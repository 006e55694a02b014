"""Cross-layer equalization of a MobileNetV2-like net, trained here on the digits, with unequal channel ranges."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qtk
from qtk.demo.digits import load_digits_split

pytestmark = pytest.mark.slow

PER_TENSOR = {"version": 1, "extends": "default", "defaults": {"weight": {"granularity": "per_tensor"}}}


def conv_bn(inside: int, outside: int, kernel: int = 1, groups: int = 1, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outside)]


class InvertedResidual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        hidden = 3 * inside
        self.is_residual = inside == outside
        self.expand = nn.Sequential(*conv_bn(inside, hidden), nn.ReLU6())
        self.depthwise = nn.Sequential(*conv_bn(hidden, hidden, 3, hidden, stride), nn.ReLU6())
        self.project = nn.Sequential(*conv_bn(hidden, outside))

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.is_residual else y


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(1, 12, 3), nn.ReLU6())
        self.blocks = nn.Sequential(
            InvertedResidual(12, 12), InvertedResidual(12, 20, stride=2), InvertedResidual(20, 20),
            InvertedResidual(20, 32, stride=2), InvertedResidual(32, 32),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu6(self.blocks(self.stem(x))).mean((2, 3)))


def trained(images: Tensor, labels: Tensor, epochs: int = 8) -> MobileNet:
    torch.manual_seed(0)
    net = MobileNet()
    optimizer = torch.optim.Adam(net.parameters())
    steps = epochs * -(-len(images) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(images[rows]), labels[rows]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def share(scores: Tensor, labels: Tensor) -> float:
    """Top-1 accuracy, 0…1."""
    return float((scores.argmax(1) == labels).double().mean())


def make_unequal(net: MobileNet, images: Tensor) -> None:
    """Divides channels in front of a ReLU6 by up to 256, and multiplies the weights behind it.

    Only channels that never reach the 6, so that the function on ``images`` stays.
    """
    largest: dict[nn.Module, Tensor] = {}
    rectifiers = [block[2] for inverted in net.blocks for block in (inverted.expand, inverted.depthwise)]
    handles = [
        each.register_forward_hook(lambda module, args, _: largest.__setitem__(module, args[0].amax((0, 2, 3))))
        for each in rectifiers
    ]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        net(images)
        for inverted in net.blocks:
            for block, following in ((inverted.expand, inverted.depthwise), (inverted.depthwise, inverted.project)):
                channels = largest[block[2]]
                factor = torch.exp2(-8 * torch.rand(len(channels), generator=generator))
                factor = torch.where(channels < 6, factor, 1.0)
                block[1].weight.mul_(factor)
                block[1].bias.mul_(factor)
                weight = following[0].weight
                weight.div_(factor.view(-1, 1, 1, 1) if weight.shape[1] == 1 else factor.view(1, -1, 1, 1))
    for handle in handles:
        handle.remove()


def test_per_tensor_weights_are_as_good_as_float_again() -> None:
    digits = load_digits_split()
    net = trained(digits.train_images, digits.train_labels)
    with torch.no_grad():
        before = share(net(digits.test_images), digits.test_labels)
        make_unequal(net, torch.cat([digits.train_images, digits.test_images]))
        in_float = share(net(digits.test_images), digits.test_labels)
        assert in_float == before > 0.95
        batches = digits.train_images[:512].split(64)
        for bits in (8, None):
            accuracy = []
            for equalized in (False, True):
                sim = qtk.QuantSim(net, batches[0], config=PER_TENSOR, weight_bits=8, activation_bits=bits)
                if equalized:
                    assert qtk.equalize_model(sim).applied
                sim.compute_encodings(batches, progress=False)
                accuracy.append(share(sim.model(digits.test_images), digits.test_labels))
            assert accuracy[0] <= in_float - 0.2
            assert accuracy[1] >= in_float - 0.005
