"""The nodes that a runtime executes: in integers or in float, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from qtk.report.table import Column, Table

SHOWN_OPS = 3
"""How many ops a row names."""


@dataclass(frozen=True, slots=True)
class FloatNode:
    """A node that computes in float.

    Args:
        kind: its kind in the runtime: ``Gemm``.
        op: the op of the model that it computes; the name of the node where that is not known.
        reason: why it is not an integer one.
        weighted: whether it multiplies and adds up: a convolution or matrix product.
    """

    kind: str
    op: str
    reason: str
    weighted: bool


@dataclass(frozen=True)
class RuntimeNodes:
    """The nodes of an optimized graph, without nodes that only move or convert values.

    Args:
        integer: kind → number of nodes that compute in integers.
        floats: the nodes that compute in float, in graph order.
    """

    integer: Mapping[str, int] = field(default_factory=dict)
    floats: tuple[FloatNode, ...] = ()

    @property
    def weighted_floats(self) -> tuple[FloatNode, ...]:
        """The convolutions and matrix products in float."""
        return tuple(node for node in self.floats if node.weighted)

    def integers(self) -> str:
        """The integer nodes by kind, the most frequent first.

        >>> RuntimeNodes({"QGemm": 1, "QLinearConv": 9}).integers()
        '9 QLinearConv, 1 QGemm'
        """
        ordered = sorted(self.integer.items(), key=lambda item: -item[1])
        return ", ".join(f"{count} {kind}" for kind, count in ordered) or "none"

    def float_table(self) -> Table:
        """The float nodes by kind and reason, convolutions and matrix products first."""
        rows = Counter((not node.weighted, node.kind, node.reason) for node in self.floats)
        ordered = sorted(rows.items(), key=lambda item: (item[0][0], -item[1]))
        texts = tuple(
            (kind, str(count), self._ops(kind, reason), reason) for (_, kind, reason), count in ordered
        )
        columns = (Column("kind"), Column("nodes", number=True), Column("ops"), Column("in float because"))
        return Table(f"nodes in float: {len(self.floats)}", columns, texts)

    def to_json(self) -> dict[str, object]:
        """``integer`` by kind; ``float``: a record for each node."""
        floats = [{"kind": node.kind, "op": node.op, "reason": node.reason} for node in self.floats]
        return {"integer": dict(self.integer), "float": floats}

    def _ops(self, kind: str, reason: str) -> str:
        ops = list(dict.fromkeys(node.op for node in self.floats if (node.kind, node.reason) == (kind, reason)))
        return ", ".join(ops[:SHOWN_OPS]) + (", …" if ops[SHOWN_OPS:] else "")
