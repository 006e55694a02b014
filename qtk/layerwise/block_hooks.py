"""Hooks of quantizers by which weights are relaxed and values are quantized or not at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from qtk.quantizers.quantizer import Quantizer

Hook: TypeAlias = Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]


def replacing(value: Callable[[], Tensor]) -> Hook:
    """A hook that puts a value in the place of the quantized one."""
    return lambda module, args, output: value().to(output.dtype)


@contextmanager
def hooked(hooks: Mapping[Quantizer, Hook]) -> Iterator[None]:
    """Hooks of quantizers act while the body runs."""
    with ExitStack() as stack:
        for quantizer, hook in hooks.items():
            stack.callback(quantizer.register_forward_hook(hook).remove)
        yield


def mixed(float_value: Any, value: Any, drop: float) -> Any:
    """A value that is the float one with probability ``drop``, number by number (QDrop, equation 9)."""
    if not drop or value is float_value or not (isinstance(value, Tensor) and isinstance(float_value, Tensor)):
        return value
    if value.shape != float_value.shape or not value.is_floating_point():
        return value
    return torch.where(torch.rand_like(value) < drop, float_value, value)


def dropping(drop: Callable[[], float]) -> Hook:
    """A hook that leaves values as they are with the probability that ``drop`` returns at the time."""
    return lambda module, args, output: mixed(args[0], output, drop())
