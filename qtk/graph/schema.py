"""The arguments of an ATen call by the names of its schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx


def schema_arguments(node: fx.Node) -> dict[str, fx.node.Argument]:
    """Every argument of an ATen call by its name in the schema, defaults included."""
    return named_arguments(node, node.args, node.kwargs)


def named_arguments(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The same with other values in place of the arguments of ``node``."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    given = dict(zip((argument.name for argument in schema), args, strict=False))
    return {argument.name: argument.default_value for argument in schema} | given | dict(kwargs)
