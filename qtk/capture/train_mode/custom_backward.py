"""Finds custom backward functions, which capture loses: a graph has the gradient of the ops in their forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch


@contextmanager
def custom_functions_run() -> Iterator[set[str]]:
    """Yields the names of the custom ``torch.autograd.Function`` classes whose forward has run in the body."""
    names: set[str] = set()
    forwards = {kind: kind.forward for kind in _subclasses(torch.autograd.Function) if _is_custom(kind)}
    with ExitStack() as stack:
        for kind, forward in forwards.items():
            stack.callback(_restore, kind, vars(kind).get("forward"))
            kind.forward = staticmethod(partial(_noted, names, kind.__qualname__, forward))  # type: ignore[method-assign]
        yield names


def _noted(names: set[str], name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    names.add(name)
    return forward(*args, **kwargs)


def _restore(kind: type[torch.autograd.Function], own: Any) -> None:
    if own is None:
        del kind.forward
    else:
        kind.forward = own  # type: ignore[method-assign]


def _is_custom(kind: type[torch.autograd.Function]) -> bool:
    return not kind.__module__.startswith(("torch.", "qtk."))


def _subclasses(kind: type[torch.autograd.Function]) -> Iterator[type[torch.autograd.Function]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
