"""The arguments of an ATen call by the names of its schema."""

from __future__ import annotations

import torch
from torch import fx


def schema_arguments(node: fx.Node) -> dict[str, fx.node.Argument]:
    """Every argument of an ATen call by its name in the schema, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    given = dict(zip((argument.name for argument in schema), node.args, strict=False))
    return {argument.name: argument.default_value for argument in schema} | given | dict(node.kwargs)
