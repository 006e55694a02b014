"""The arguments of an ATen call by the names of its schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx


def schema_arguments(
    node: fx.Node, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> dict[str, fx.node.Argument]:
    """Every argument of an ATen call by its name in the schema, defaults included.

    Args:
        node: the call.
        args: positional arguments in place of those of ``node``.
        kwargs: likewise.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    names = (argument.name for argument in schema)
    return {
        **{argument.name: argument.default_value for argument in schema},
        **dict(zip(names, node.args if args is None else args, strict=False)),
        **(node.kwargs if kwargs is None else kwargs),
    }
