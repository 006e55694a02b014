"""Name and arguments of an ATen call, by its schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from qtk.torch_private import schema_of


def schema_arguments(node: fx.Node) -> dict[str, fx.node.Argument]:
    """Every argument of an ATen call by its name in the schema, defaults included."""
    return named_arguments(node, node.args, node.kwargs)


def named_arguments(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The same with other values in place of the arguments of ``node``."""
    schema = schema_of(node.target)
    assert schema is not None, f"{node} calls no op of torch"
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    return {argument.name: argument.default_value for argument in schema.arguments} | given | dict(kwargs)


def aten_name(target: object) -> str | None:
    """``"add"`` for ``aten.add.Tensor``, with the namespace for others than aten, ``None`` for what is no op."""
    schema = schema_of(target)
    return None if schema is None else schema.name.removeprefix("aten::")
