"""Gives the dropouts of captured graphs the probabilities that they have in train mode.

``dropout_p=self.p if self.training else 0.0`` is 0 in the code that capture sees. In train mode the same module calls
the same functions in the same order, and shows what they drop with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from qtk.graph.graphs import roots
from qtk.graph.sites import OWNER, label, prefixes
from qtk.nn.attention import Attention
from qtk.nn.dropout import Dropout
from qtk.nn.scan import Scan
from qtk.operators.targets import called_module


def adopt_drops(prepared: nn.Module, drops: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Sets ``p`` of the dropouts and attentions in the graphs of ``prepared``. Changes it.

    Args:
        prepared: a prepared model.
        drops: as ``WithoutDropout`` has seen them when the original ran in train mode.

    Yields: a note for each module whose dropout has no place in the graph, where its code does otherwise in eval mode.
    """
    inside = roots(prepared)
    first_paths = {module: path for path, module in reversed(list(prepared.named_modules(remove_duplicate=False)))}
    same = {path: first_paths[module] for path, module in prepared.named_modules(remove_duplicate=False)}
    calls: dict[str, list[Attention | Dropout]] = defaultdict(list)
    asked: set[str] = set()  # paths of modules that a scan asks for their mode
    for graph in inside.values():
        for node in graph.graph.nodes:
            module = called_module(node)
            if isinstance(module, Scan) and module.modules_passed:
                asked.add((label(node, OWNER) or "").partition("@")[0])
            if isinstance(module, (Attention, Dropout)):
                path = (label(node, OWNER) or "").partition("@")[0]
                if module not in calls[same.get(path, path)]:  # graphs for several kinds of calls share it
                    calls[same.get(path, path)].append(module)
    for path, probabilities in drops.items():
        if inside.keys().isdisjoint(prefixes(path)):  # its own code runs
            continue
        size = len(calls[path])
        if size and list(probabilities[:size]) * (len(probabilities) // size) == list(probabilities):
            for module, p in zip(calls[path], probabilities[:size], strict=True):  # an island may run several times
                module.p = p
        elif any(probabilities) and (size or path not in asked):
            yield f"{path or 'the model'}: dropout does not act, its code calls it in train mode only"
