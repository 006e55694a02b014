"""Functions with a vmap rule at the price of those without one: torch looks their signatures up at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qtk.torch_private import is_traced


def differentiable(
    forward: Callable[..., Any], save: Callable[[Any, tuple[Any, ...], Any], None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """``forward`` with a gradient: ``save`` fills a context with inputs and output, ``backward`` reads it.

    Tracers and transforms apply a function with a vmap rule; plain eager mode one that has no ``setup_context``.

    >>> twice = differentiable(lambda x: 2 * x, lambda ctx, inputs, output: None, lambda ctx, grad: 2 * grad)
    >>> x = torch.ones(2, requires_grad=True)
    >>> torch.autograd.grad(twice(x).sum(), x), torch.func.vmap(twice)(torch.ones(2))
    ((tensor([2., 2.]),), tensor([2., 2.]))
    """

    def at_once(ctx: Any, *inputs: Any) -> Any:
        output = forward(*inputs)
        save(ctx, inputs, output)
        return output

    traced: type[torch.autograd.Function] = type("Differentiable", (torch.autograd.Function,), {
        "generate_vmap_rule": True, "forward": staticmethod(forward), "setup_context": staticmethod(save),
        "backward": staticmethod(backward),
    })
    eager: type[torch.autograd.Function] = type("Differentiable", (torch.autograd.Function,), {
        "forward": staticmethod(at_once), "backward": staticmethod(backward),
    })

    def apply(*inputs: Any) -> Any:
        plain = not torch.compiler.is_compiling() and not is_traced()
        return (eager if plain else traced).apply(*inputs)

    return apply
