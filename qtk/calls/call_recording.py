"""Records the calls of submodules, or of a whole model, while it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from qtk.calls.calls import Call, detached
from qtk.calls.token_masks import TokenMasks
from qtk.graph.graphs import entered
from qtk.graph.written_buffers import buffer_values


def record_calls(
    model: nn.Module, calls: Sequence[Call], *, of: Collection[nn.Module] | None = None
) -> dict[nn.Module, list[Call]]:
    """Runs ``model`` with the arguments of ``calls`` and records the calls of its submodules.

    Args:
        model: the model to run.
        calls: its arguments; their outputs are not used.
        of: the submodules to record; ``None``: all that the code of ``model`` itself calls.

    Returns: module → its calls, in order of first call. Calls inside another recorded call are left out, and so are
        calls whose exception ``model`` caught.
    """
    recorded: dict[nn.Module, list[Call]] = {}
    running: list[tuple[tuple[Any, ...], dict[str, Any], BaseException | None]] = []
    depth = 0

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal depth
        if depth == 0:
            recorded.setdefault(module, [])
            running.append((detached(args), detached(kwargs), sys.exc_info()[1]))
        depth += 1

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            args_before, kwargs_before, handled = running.pop()
            if sys.exc_info()[1] is handled:  # else the call raised
                recorded[module].append(Call(args_before, kwargs_before, detached(output)))

    if of is None:
        of = [m for m in model.modules() if m is not model and not isinstance(m, torch.jit.ScriptModule)]
    handles = [module.register_forward_pre_hook(before, prepend=True, with_kwargs=True) for module in of]
    handles += [
        module.register_forward_hook(after, with_kwargs=True, always_call=True) for module in of
    ]
    try:
        with torch.no_grad():
            for call in calls:
                model(*detached(call.args), **detached(call.kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return {module: its_calls for module, its_calls in recorded.items() if its_calls}


class Recorded(BaseException):
    """Aborts a call once its arguments are recorded; a ``BaseException``, so that user code does not catch it."""


@contextmanager
def recording(
    model: nn.Module, *, run: bool, valid: Callable[[tuple[Any, ...], dict[str, Any]], TokenMasks | None] | None = None
) -> Iterator[list[Call]]:
    """Collects the calls of ``model`` made while the body runs, with copies of their tensors and of written buffers.

    Args:
        model: a prepared model.
        run: whether the calls run to their end; otherwise each raises ``Recorded``.
        valid: which tokens of a call with such arguments count; ``None``: all.
    """
    calls: list[Call] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = None if valid is None else valid(args, kwargs)
        buffers = buffer_values(module) if isinstance(module, fx.GraphModule) else {}
        calls.append(Call(detached(args), detached(kwargs), None, mask, buffers))
        if not run:
            raise Recorded

    handles = [module.register_forward_pre_hook(before, with_kwargs=True) for module in entered(model)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
