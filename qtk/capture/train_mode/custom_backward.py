"""Finds custom backward functions, which capture loses: a graph has the gradient of the ops in their forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from qtk.calls.calls import detached
from qtk.capture.restored import restored
from qtk.errors import OUT_OF_MEMORY
from qtk.graph.captured_graph import CapturedGraph
from qtk.nn.mapped_weights import bounded
from qtk.torch_private import custom_functions, pytree


def lost_backwards(
    original: nn.Module, prepared: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """Names of the custom ``torch.autograd.Function`` classes that ``original`` uses and ``prepared`` does not.

    Runs both in train mode with gradients, unless no such class is defined; the state of both is restored.
    """
    if not any(_is_custom(kind) for kind in _subclasses(torch.autograd.Function)):
        return []
    lost = _backwards(original, args, kwargs)
    if lost and not isinstance(prepared, CapturedGraph):
        lost -= _backwards(prepared, args, kwargs)
    return sorted(lost)


def _backwards(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
    """Names of the custom functions in the autograd graph of a run; empty if the model does not run with gradients.

    The graph keeps no value for a backward pass, unless the forward differentiates something itself.
    """
    for keeping in (saved_tensors_hooks(lambda _: None, _refuse), nullcontext()):
        try:
            tensors = {name: _with_gradient(parameter.detach()) for name, parameter in model.named_parameters()}
            tensors |= {name: buffer.clone() for name, buffer in model.named_buffers()}
            own_args, own_kwargs = pytree.tree_map_only(Tensor, _with_gradient, detached((args, kwargs)))
            with restored(model), bounded(model), torch.enable_grad(), keeping:
                output = functional_call(model.train(), tensors, own_args, own_kwargs)
        except OUT_OF_MEMORY:
            raise
        except Exception:
            continue
        results = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        return {kind.__qualname__ for result in results for kind in custom_functions(result) if _is_custom(kind)}
    return set()


def _refuse(_: None) -> Tensor:
    raise RuntimeError("this value was not kept for a backward pass")


def _with_gradient(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _is_custom(kind: type[torch.autograd.Function]) -> bool:
    return not kind.__module__.startswith(("torch.", "qtk."))


def _subclasses(kind: type[torch.autograd.Function]) -> Iterator[type[torch.autograd.Function]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
