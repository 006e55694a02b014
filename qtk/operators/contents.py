"""What a graph holds, by the rows of its ops: what a step of a list names that needs it."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import torch
from torch import fx

from qtk.operators.op_row import Mask, OpRow, Product
from qtk.operators.op_table import row_of
from qtk.torch_private import schema_of

CONVOLUTIONS = (Product.CONV, Product.CONV_TRANSPOSE)


class Trait(enum.Enum):
    """What a graph may hold beside the columns of the op table."""

    COMPOSITES = "ops with graphs inside"
    INTEGERS = "tensors of integers, or booleans"
    STACKS = "stored tensors of three axes or more that others than convolutions read"
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
        if node.op == "get_attr" and isinstance(value, torch.Tensor) and value.ndim > 2 and _is_stack(node):
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


def _is_stack(node: fx.Node) -> bool:
    """Whether an op reads a stored tensor, or what a quantizer makes of it, that is no convolution."""
    rows = [(user, row_of(user)) for user in node.users]
    return any(
        row.product not in CONVOLUTIONS if row is not None else user.op != "call_module" or _is_stack(user)
        for user, row in rows
    )
