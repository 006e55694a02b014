"""Functions with a vmap rule at the price of those without one: torch looks their signatures up at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qtk.torch_private import is_traced


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply``; in plain eager mode by a function that does the same and has no ``setup_context``.

    >>> class Twice(torch.autograd.Function):
    ...     generate_vmap_rule = True
    ...     forward = staticmethod(lambda x: 2 * x)
    ...     setup_context = staticmethod(lambda ctx, inputs, output: None)
    ...     backward = staticmethod(lambda ctx, grad: 2 * grad)
    >>> x = torch.ones(2, requires_grad=True)
    >>> torch.autograd.grad(applied(Twice)(x).sum(), x), torch.func.vmap(applied(Twice))(torch.ones(2))
    ((tensor([2., 2.]),), tensor([2., 2.]))
    """

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = function.forward(*inputs)
        function.setup_context(ctx, inputs, output)
        return output

    eager: type[torch.autograd.Function] = type(
        function.__name__, (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(function.backward)},
    )

    def apply(*inputs: Any) -> Any:
        plain = not torch.compiler.is_compiling() and not is_traced()
        return (eager if plain else function).apply(*inputs)

    return apply
