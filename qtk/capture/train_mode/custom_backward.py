"""Finds custom backward functions, which capture loses: a graph has the gradient of the ops in their forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
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

    Runs both in train mode with gradients; the state of both is restored.
    """
    lost = _backwards(original, args, kwargs)
    if lost and not isinstance(prepared, CapturedGraph):
        lost -= _backwards(prepared, args, kwargs)
    return sorted(lost)


@contextmanager
def noting_custom_functions() -> Iterator[set[str]]:
    """Yields: the names of the custom functions whose forward has run in the body, in any mode.

    Their forward is another while the body runs, for a user's code may hold their ``apply``.
    """
    names: set[str] = set()
    forwards = {kind: vars(kind)["forward"] for kind in _subclasses(torch.autograd.Function)
                if _is_custom(kind) and isinstance(vars(kind).get("forward"), staticmethod)}

    def noting(name: str, forward: Callable[..., object]) -> Callable[..., object]:
        @wraps(forward)
        def noted(*args: Any, **kwargs: Any) -> object:
            names.add(name)
            return forward(*args, **kwargs)

        return noted

    try:
        for kind, forward in forwards.items():
            kind.forward = staticmethod(noting(kind.__qualname__, forward.__func__))  # type: ignore[method-assign]
        yield names
    finally:
        for kind, forward in forwards.items():
            kind.forward = forward  # type: ignore[method-assign]


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
