"""Names of the nodes in an ONNX graph: the op of the prepared model that each computes."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir
from torch import fx

from qtk.graph.sites import OP, OWNER, join, label
from qtk.operators.targets import path_of


def name_nodes(model: ir.Model) -> None:
    """Names every node whose origin torch's exporter recorded ``<op>/<kind>``: ``blocks.0.attn.qkv/MatMul``. In place.

    An op may become several nodes; those of one kind are numbered. Constants lose their names, which would only take
    room; other nodes keep theirs. Parameters have the names of the original model.
    """
    for value in list(model.graph.initializers.values()):
        value.name = path_of(value.name)
    counts: Counter[str] = Counter()
    for node in model.graph.all_nodes():
        if node.op_type == "Constant":
            node.name = None
            continue
        origin = node.meta.get("node")
        if not isinstance(origin, fx.Node):
            continue
        op = join(label(origin, OWNER) or "", label(origin, OP) or "")
        if op:
            name = f"{op}/{node.op_type}"
            node.name = f"{name}_{counts[name]}" if counts[name] else name
            counts[name] += 1


def op_of(name: str) -> str | None:
    """The op in a name that ``name_nodes`` gave, also after a runtime has put something behind it; else ``None``.

    >>> op_of("blocks.0.attn.qkv/MatMul_1_token_4"), op_of("node_Squeeze_12")
    ('blocks.0.attn.qkv', None)
    """
    return name.rpartition("/")[0] or None
