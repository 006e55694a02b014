"""Nets whose weights have channels of very unequal ranges, and their equalization."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtk.calls.calls import Call
from qtk.capture.prepared_model import PreparedModel
from qtk.transforms.equalize import equalize_layers
from qtk.transforms.result import TransformResult
from tests.transforms.scaling import prepare
from tests.transforms.scaling_nets import net


def unequal(model: nn.Module) -> nn.Module:
    """Every weight with rows and columns of very unequal ranges."""
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            for axis in (0, 1):
                shape = [-1 if other == axis else 1 for other in range(parameter.ndim)]
                spread = torch.exp2(torch.randn(parameter.shape[axis], generator=generator) * 2)
                parameter.data = parameter.data * spread.view(shape)
    return model


def images(*shape: int) -> Tensor:
    return torch.randn(8, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def equalized(model: nn.Module, x: Tensor) -> tuple[PreparedModel, PreparedModel, TransformResult]:
    """The prepared model before and after, and the result."""
    prepared = prepare(model, x)
    before = copy.deepcopy(prepared)
    return before, prepared, equalize_layers(prepared, Call((x,), {}, None))


def conv(into: int, out: int, size: int = 1, **options: int) -> nn.Conv2d:
    return nn.Conv2d(into, out, size, **options)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {  # net, input, number of groups
    "relu": (lambda: net(lambda m, x: m.b(F.relu(m.a(x))), a=conv(2, 6, 3, padding=1), b=conv(6, 3, 3)), (2, 6, 6), 1),
    "prelu": (lambda: net(lambda m, x: m.b(m.act(m.a(x))), a=conv(2, 6), b=conv(6, 3), act=nn.PReLU(6)), (2, 6, 6), 1),
    "relu6": (lambda: net(lambda m, x: m.b(m.act(m.a(x))), a=conv(2, 6), b=conv(6, 3), act=nn.ReLU6()), (2, 6, 6), 1),
    "hardtanh": (
        lambda: net(lambda m, x: m.b(F.hardtanh(m.a(x), -2.0, 3.0)), a=conv(2, 6), b=conv(6, 3)), (2, 6, 6), 1),
    "clamped from above": (
        lambda: net(lambda m, x: m.b(m.a(x).clamp(max=1.0)), a=conv(2, 6), b=conv(6, 3)), (2, 6, 6), 1),
    "linear chain": (
        lambda: net(lambda m, x: m.c(m.b(m.a(x))), a=nn.Linear(3, 5), b=nn.Linear(5, 4), c=nn.Linear(4, 2)), (3,), 2),
    "depthwise triple": (
        lambda: net(lambda m, x: m.c(F.relu6(m.b(F.relu6(m.a(x))))), a=conv(2, 6), b=conv(6, 6, 3, groups=6),
                    c=conv(6, 3)), (2, 6, 6), 2),
    "residual region": (
        lambda: net(
            lambda m, x: m.head(F.relu((y := F.relu((z := F.relu(m.stem(x))) + m.b(F.relu(m.a(z))))) + m.d(
                F.relu(m.c(y)))).mean((2, 3))),
            stem=conv(2, 4), a=conv(4, 6, 3, padding=1), b=conv(6, 4), c=conv(4, 5), d=conv(5, 4, 3, padding=1),
            head=nn.Linear(4, 3)), (2, 6, 6), 3),
    "grouped and transposed": (
        lambda: net(lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))), a=conv(2, 6), b=conv(6, 4, 3, groups=2),
                    c=nn.ConvTranspose2d(4, 6, 2, groups=2)), (2, 6, 6), 2),
    "concat": (
        lambda: net(lambda m, x: m.c(torch.cat([F.relu(m.a(x)), F.relu6(m.b(x))], 1)), a=conv(2, 3), b=conv(2, 4),
                    c=conv(7, 3)), (2, 6, 6), 2),
    "one clamp of a concat": (
        lambda: net(lambda m, x: m.c(F.relu6(torch.cat([m.a(x), m.b(x)], 1))), a=conv(2, 3), b=conv(2, 4),
                    c=conv(7, 3)), (2, 6, 6), 2),
    "one clamp module called twice": (
        lambda: net(lambda m, x: m.c(m.act(m.b(m.act(m.a(x))))), a=conv(2, 3), b=conv(3, 4), c=conv(4, 3),
                    act=nn.ReLU6()), (2, 6, 6), 2),
}
