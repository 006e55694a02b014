"""What a graph holds, by the rows of its ops: what a step of a list names that needs it."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import torch
from torch import fx

from qtk.operators.lookup import row_of
from qtk.operators.op_row import Mask, OpRow, Product, Role
from qtk.torch_private import schema_of

CONVOLUTIONS = (Product.CONV, Product.CONV_TRANSPOSE)


class Trait(enum.Enum):
    """What a graph may hold beside the columns of the op table."""

    COMPOSITES = "ops with graphs inside"
    INTEGERS = "tensors of integers, or booleans"
    STACKS = "stored tensors that others than convolutions read with three axes or more"
    WRITES = "ops that write into what they read, as into buffers"


def contents(nodes: Iterable[fx.Node]) -> frozenset[object]:
    """The kinds, families, roles and other columns of the ops of ``nodes``, and their traits.

    >>> import qtk
    >>> graph = qtk.prepare_model(torch.nn.Linear(4, 2), torch.randn(3, 4)).graph
    >>> sorted(each for each in contents(graph.nodes) if isinstance(each, str))
    ['linear']
    """
    rows: dict[int, OpRow] = {}
    found: set[object] = set()
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
            found.add(Trait.INTEGERS)
        if node.op == "get_attr" and isinstance(value, torch.Tensor) and value.ndim > 1 and _is_stack(node, value.ndim):
            found.add(Trait.STACKS)
        if node.op not in ("call_function", "call_module"):
            continue
        row = row_of(node)
        if row is not None:
            rows[id(row)] = row
        schema = schema_of(node.target)
        if schema is not None and schema.is_mutable:
            found.add(Trait.WRITES)
    for row in rows.values():
        columns = {*row.names, row.role, row.product, row.feeding, row.precision}
        found |= {*(columns - {None}), *(flag for flag in Mask if flag in row.mask)}
        if row.inside is not None:
            found |= {Trait.COMPOSITES, row.inside}
    return frozenset(found)


def _is_stack(node: fx.Node, ndim: int) -> bool:
    """Says whether an op that is no convolution reads a stored tensor with three axes or more."""
    value = node.meta.get("val")
    ndim = value.ndim if isinstance(value, torch.Tensor) else ndim
    for user in node.users:
        row = row_of(user)
        if row.role is Role.MOVEMENT if row is not None else user.op == "call_module":
            if _is_stack(user, ndim):
                return True
        elif ndim > 2 and (row is None or row.product not in CONVOLUTIONS):
            return True
    return False
