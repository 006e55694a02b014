"""Name and named arguments of an ATen call, from the op's schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from qtk.torch_private import schema_of


def schema_arguments(node: fx.Node) -> dict[str, fx.node.Argument]:
    """Name → argument of an ATen call, defaults included."""
    return named_arguments(node, node.args, node.kwargs)


def named_arguments(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """As ``schema_arguments``, with ``args`` and ``kwargs`` in place of the arguments of ``node``."""
    schema = schema_of(node.target)
    assert schema is not None, f"{node} calls no op of torch"
    positional = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    return {argument.name: argument.default_value for argument in schema.arguments} | positional | dict(kwargs)


def aten_name(target: object) -> str | None:
    """``"add"`` for ``aten.add.Tensor``; other ops with their namespace; ``None`` if ``target`` is no op."""
    schema = schema_of(target)
    return None if schema is None else schema.name.removeprefix("aten::")
