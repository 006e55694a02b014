"""Finds the parameters that the first run of a model writes in place, and gives them their values again.

As in ``torch.nn.Embedding(max_norm=…)``. Copies of all parameters would take as much memory as the model, so a
parameter is copied when an op is about to write it; that a parameter is written is known from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from qtk.torch_private import TorchDispatchMode, pytree, schema_of, storage_of

_WRITTEN = WeakIdKeyDictionary()
"""The parameters that some forward has written."""


def written_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter of ``model`` that a forward is known to write in place."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter in _WRITTEN}


@contextmanager
def finding_written_parameters(model: nn.Module) -> Iterator[None]:
    """While the body runs, finds the parameters that ops write, which have their values again afterwards."""
    mode = _Writes([parameter for parameter in model.parameters() if is_plain(parameter)])
    try:
        with mode:
            yield
    finally:
        with torch.no_grad():
            for parameter, value in mode.before:
                parameter.copy_(value)
                _WRITTEN[parameter] = True


def is_plain(parameter: Tensor) -> bool:
    """Says whether a parameter has memory of its own, of which torch counts the writes."""
    is_dense = not is_lazy(parameter) and parameter.layout is torch.strided
    return is_dense and not parameter.is_inference() and type(parameter.data) is Tensor


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies a parameter before an op writes it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_storage: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            self._of_storage.setdefault(storage_of(parameter), []).append(parameter)
        self.before: list[tuple[nn.Parameter, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        schema, named = schema_of(func), kwargs or {}
        for index, argument in enumerate(schema.arguments if schema is not None and schema.is_mutable else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(args[index] if index < len(args) else named.get(argument.name))
        return func(*args, **named)

    def _keep(self, written: object) -> None:
        for leaf in pytree.tree_leaves(written):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                for parameter in self._of_storage.pop(storage_of(leaf), ()):
                    self.before.append((parameter, parameter.detach().clone()))
