"""Excluded submodules, which stay in float: finds their names and labels the ops they run."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx, nn

from qtk.capture.prepared_model import PreparedModel
from qtk.errors import CaptureError
from qtk.graph.graphs import graphs
from qtk.graph.sites import EXCLUDED, GRAPH_PATH, add_labels, join, label, prefixes
from qtk.registry import nearest


def module_names(model: nn.Module, module: nn.Module | str) -> set[str]:
    """All names of one submodule of ``model``; a shared submodule has several.

    Raises: CaptureError if ``module`` is no submodule, with the nearest name.
    """
    known = dict(model.named_modules(remove_duplicate=False))
    wanted = module if isinstance(module, nn.Module) else known.get(module)
    names = {path for path, other in known.items() if other is wanted}
    if not names:
        what = repr(module) if isinstance(module, str) else f"a {type(module).__name__}"
        hint = f"; {nearest(module, known)}" if isinstance(module, str) else ""
        raise CaptureError(f"modules_to_exclude: {what} is no submodule of {type(model).__name__}{hint}")
    return names


def exclude(prepared: PreparedModel, excluded: Collection[set[str]]) -> Iterator[str]:
    """Labels the ops of excluded modules. Changes ``prepared``. Yields: a note for each module that runs no op.

    Args:
        prepared: a prepared model.
        excluded: the names of each module.
    """
    paths = set().union(*excluded)
    nodes = [node for module in graphs(prepared).values() for node in module.graph.nodes]
    for node in nodes:
        if not paths.isdisjoint(_modules_around(node)):
            add_labels(node, **{EXCLUDED: "1"})
    running = {path for node in nodes for path in _modules_around(node)}
    running |= {part.path for part in prepared.report.parts}
    yield from (f"modules_to_exclude: {min(names)} runs no op" for names in excluded if names.isdisjoint(running))


def _modules_around(node: fx.Node) -> Iterator[str]:
    """Paths of the modules that contain ``node``, and their prefixes: a symbolic trace inlines the modules between."""
    for value in (node.meta.get("nn_module_stack") or {}).values():
        yield from prefixes(join(label(node, GRAPH_PATH) or "", value[0].partition("@")[0]))
