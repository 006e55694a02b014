"""Modules whose inner values autograd computes again in the backward pass instead of keeping them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qtk.nn.tap import Tap, all_repeatable
from qtk.torch_private import hooks_on_saved_tensors_work, is_traced, version_of


def recomputed(module: nn.Module, *inputs: Tensor | None) -> Tensor:
    """``module(*inputs)``, of which autograd keeps the inputs alone. The backward pass runs the module once more.

    Where no gradient is asked for, and where a second run would be seen (by an observer, a hook or a tracer), the
    module is simply called.

    Raises: RuntimeError in the backward pass if the module has been changed since: its mode, a quantizer, or a tensor.

    >>> x = torch.randn(3, requires_grad=True)
    >>> kept = []
    >>> with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda kept: kept):
    ...     result = recomputed(nn.Sequential(nn.Sigmoid(), nn.Tanh()), x)
    >>> kept == [x]
    True
    """
    result: Tensor
    if not _pays(module, inputs):
        result = module(*inputs)
        return result
    state: list[object] = []

    def run(*inputs: Tensor | None) -> Tensor:
        now = _state_of(module)
        if state and state != now:
            raise RuntimeError(
                "attention was changed between forward and backward, which computes its inner values again: train or "
                "eval mode, a quantizer in it or one of its ranges; call backward before you change them"
            )
        state[:] = now
        result: Tensor = module(*inputs)
        return result

    result = checkpoint(run, *inputs, use_reentrant=False)
    return result


def _pays(module: nn.Module, inputs: tuple[Tensor | None, ...]) -> bool:
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_traced():
        return False
    if not any(value is not None and value.requires_grad for value in inputs):
        return False
    return hooks_on_saved_tensors_work() and all_repeatable(module)


def _state_of(module: nn.Module) -> list[object]:
    """Returns what decides on the result of a module beside its inputs."""
    flags = [(inner.training, isinstance(inner, Tap) and inner.idle) for inner in module.modules()]
    tensors = [*module.parameters(), *module.buffers()]
    return [*flags, *((id(tensor), version_of(tensor)) for tensor in tensors)]
