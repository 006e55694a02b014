"""Restores a model whose graphs and members a transform has changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from qtk.graph.graphs import graphs
from qtk.torch_private import MODULE_TABLES


class Snapshot:
    """The graphs and members of a model as they are at construction, to return to them.

    Tensors are not copied: transforms replace parameters instead of writing to them.

    Args:
        model: a prepared model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._graphs = [(module, copy.deepcopy(module.graph)) for module in graphs(model).values()]
        metas = [vars(module).get("meta") for module in model.modules()]
        self._metas = [(meta, dict(meta)) for meta in metas if isinstance(meta, dict)]
        modules = [*model.modules(), *(module for module, _ in self._graphs)]
        tables = {id(table): table for module in modules for name in MODULE_TABLES for table in (vars(module)[name],)}
        self._tables = [(table, copy.copy(table)) for table in tables.values()]

    def restore(self) -> None:
        """Returns the model to that state; may be called once, for the graphs are handed over."""
        for table, entries in self._tables:
            table.clear()
            table.update(entries)
        for meta, items in self._metas:
            meta.clear()
            meta.update(items)
        for module, graph in self._graphs:
            module.graph = graph
            module.recompile()


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Returns ``model`` to its state before if the body raises."""
    snapshot = Snapshot(model)
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise
