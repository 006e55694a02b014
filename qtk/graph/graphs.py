"""The captured graphs of a prepared model, itself, its islands and graphs nested in modules of a graph; its states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from qtk.graph.captured_graph import CapturedGraph
from qtk.operators.contents import contents
from qtk.operators.targets import called_module


def graphs(model: nn.Module) -> dict[str, CapturedGraph]:
    """Module path → captured graph, outer graphs before nested ones; variants as ``path@1`` and so on."""
    by_path: dict[str, CapturedGraph] = {}
    for path, module in _above_leaves(model, "", set()):
        if isinstance(module, CapturedGraph):
            by_path[path] = module
            by_path |= {f"{path}@{index}": graph for index, graph in enumerate(module.variants.values(), 1)}
    return by_path


def _above_leaves(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields path and module as ``named_modules`` does, without modules that hold none, but graphs: most are such."""
    if module in seen:
        return
    seen.add(module)
    yield path, module
    for name, child in module._modules.items():
        if child is not None and (child._modules or isinstance(child, CapturedGraph)):
            yield from _above_leaves(child, f"{path}.{name}" if path else name, seen)


def roots(model: nn.Module) -> dict[str, CapturedGraph]:
    """The graphs that are nested in no other: the model itself, or its islands, and variants of these."""
    by_path = graphs(model)
    return {path: graph for path, graph in by_path.items() if not any(_is_below(path, other) for other in by_path)}


def contents_of(model: nn.Module) -> frozenset[object]:
    """Returns what the graphs of a model hold, graphs nested in modules of a graph included: see ``contents``."""
    return contents(node for graph in graphs(model).values() for node in graph.graph.nodes)


def entered(model: nn.Module) -> list[nn.Module]:
    """The modules of which each call of ``model`` runs one, with hooks of its own: itself and its variants."""
    return [model, *(model.variants.values() if isinstance(model, CapturedGraph) else ())]


def with_nested(graph: nn.Module) -> list[CapturedGraph]:
    """``graph`` and the graphs nested in it, without variants."""
    return [module for module in graph.modules() if isinstance(module, CapturedGraph)]


def nested_graphs(node: fx.Node) -> dict[str, CapturedGraph]:
    """Path → graph for every graph inside the module that ``node`` calls; empty if it calls none."""
    module = called_module(node)
    return {} if module is None else graphs(module)


def _is_below(path: str, other: str) -> bool:
    if not other:
        return not (path == other or path.startswith("@"))
    return path.startswith(f"{other}.")


def meta_of(model: nn.Module) -> dict[str, Any]:
    """Returns what is noted about a prepared model; empty of another module."""
    return vars(model).get("meta") or {}


STATES = "qtk_states"
"""Key of the ``meta`` of a graph: name of an input → index of the output that it is the next time."""


def states_of(model: nn.Module) -> dict[str, int]:
    """Name of an input → index of the output that it is in the next call; empty if the model has no states."""
    graph = roots(model).get("")
    return {} if graph is None else returned_states(graph)


def returned_states(graph: fx.GraphModule) -> dict[str, int]:
    """Name of a state → index of the output of one graph, of a variant too, that it is in the next call."""
    return dict(graph.meta.get(STATES, {}))
