"""The captured graphs of a prepared model: the model itself, its islands, and those nested in modules of a graph."""

from __future__ import annotations

from torch import fx, nn

from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.targets import called_module


def graphs(model: nn.Module) -> dict[str, CapturedGraph]:
    """Every captured graph by its module path, those around others first; its variants as ``path@1`` and so on."""
    by_path = {}
    for path, module in model.named_modules():
        if isinstance(module, CapturedGraph):
            by_path[path] = module
            by_path |= {f"{path}@{index}": graph for index, graph in enumerate(module.variants.values(), 1)}
    return by_path


def roots(model: nn.Module) -> dict[str, CapturedGraph]:
    """The graphs that lie in no other: the model itself, or its islands."""
    by_path = graphs(model)
    return {path: graph for path, graph in by_path.items() if not any(_is_below(path, other) for other in by_path)}


def with_nested(graph: nn.Module) -> list[CapturedGraph]:
    """``graph`` and those inside of it, without its variants."""
    return [module for module in graph.modules() if isinstance(module, CapturedGraph)]


def nested_graphs(node: fx.Node) -> dict[str, CapturedGraph]:
    """The graphs inside the module that ``node`` calls, by their path in it, in order."""
    module = called_module(node)
    return {} if module is None else graphs(module)


def _is_below(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))
