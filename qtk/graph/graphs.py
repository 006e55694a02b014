"""The captured graphs of a prepared model: the model itself, its islands, and those nested in modules of a graph."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn

from qtk.graph.captured_graph import CapturedGraph


def graphs(model: nn.Module) -> dict[str, CapturedGraph]:
    """Every captured graph by its module path, those around others first."""
    return {path: module for path, module in model.named_modules() if isinstance(module, CapturedGraph)}


def roots(model: nn.Module) -> dict[str, CapturedGraph]:
    """The graphs that lie in no other: the model itself, or its islands."""
    found = graphs(model)
    return {path: graph for path, graph in found.items() if not any(_is_below(path, other) for other in found)}


def nested_graphs(node: fx.Node) -> Iterator[CapturedGraph]:
    """The graphs inside the module that ``node`` calls, in order."""
    owner = node.graph.owning_module
    if node.op == "call_module" and owner is not None:
        for module in owner.get_submodule(str(node.target)).modules():
            if isinstance(module, CapturedGraph):
                yield module


def _is_below(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))
