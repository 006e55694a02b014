"""How a user's data call a model: the arguments of every call, without what comes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from qtk.capture.calls import Call, detached
from qtk.graph.captured_graph import CapturedGraph


class Recorded(BaseException):
    """Ends a call whose arguments are known; no ``except Exception`` of a user's stops it."""


@contextmanager
def recording(model: nn.Module, *, run: bool) -> Iterator[list[Call]]:
    """Collects the calls of ``model`` made while the body runs, with copies of their tensors.

    Args:
        model: a prepared model.
        run: let the calls return; otherwise each raises ``Recorded``.
    """
    calls: list[Call] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Call(detached(args), detached(kwargs), None))
        if not run:
            raise Recorded

    graphs = [model, *(model.variants.values() if isinstance(model, CapturedGraph) else ())]
    handles = [graph.register_forward_pre_hook(before, with_kwargs=True) for graph in graphs]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()

