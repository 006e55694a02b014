"""Finds the buffers that a captured graph writes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from qtk.torch_private import schema_of


def written_buffers(graph: fx.Graph) -> list[str]:
    """The names of the buffers that an op of ``graph`` writes in place, in order, each once."""
    return list(dict.fromkeys(_written(graph)))


def _written(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        schema = schema_of(node.target)
        if schema is None:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, fx.Node) and value.op == "get_attr":
                yield str(value.target)
