"""The quantizers of a graph's parameters, and the parameters as they are now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.insert import quantizer_nodes
from qtk.kernels.backends import shares_launches
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.quantizers.shared_launch import Request

Place: TypeAlias = tuple[Quantizer, dict[str, Tensor | None], str]
"""A quantizer, the table of parameters of the module that has its weight, and the name in it."""

_PLACES: WeakKeyDictionary[CapturedGraph, tuple[int, list[Place]]] = WeakKeyDictionary()


def weight_requests(graph: CapturedGraph) -> Iterator[Request]:
    """What the quantizers of parameters will compute in the next call, where it depends on nothing that happens in it.

    A range that is learned or follows its weight is found in the call itself, and a weight that is cached is there.
    """
    for quantizer, table, name in _places(graph):
        weight = table.get(name)
        if weight is None or not shares_launches(weight.device):
            continue
        scale = quantizer.scale
        moves = quantizer.momentum is not None or quantizer.learns_range
        is_cached = quantizer.weight_cache.enabled and not torch.is_grad_enabled()
        if scale is not None and quantizer.mode is Mode.SIMULATE and not moves and not is_cached:
            yield Request(weight, quantizer.spec, scale, quantizer.zero_point)


def _places(graph: CapturedGraph) -> list[Place]:
    revision, places = _PLACES.get(graph, (None, []))
    if revision != graph.revision:
        places = [place for node, quantizer in quantizer_nodes(graph).items()
                  if (place := _place(graph, node, quantizer)) is not None]
        _PLACES[graph] = graph.revision, places
    return places


def _place(graph: CapturedGraph, node: fx.Node, quantizer: Quantizer) -> Place | None:
    """``None`` for a quantizer of anything but a parameter, and one that is of a kind of its own."""
    source = node.args[0]
    if type(quantizer) is not Quantizer or not quantizer.cache or not isinstance(source, fx.Node):
        return None
    owner, _, name = str(source.target).rpartition(".")
    if source.op != "get_attr":
        return None
    table = vars(graph.get_submodule(owner))["_parameters"]
    return (quantizer, table, name) if name in table else None
