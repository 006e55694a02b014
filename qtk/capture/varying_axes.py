"""Finds the axes of a submodule's inputs whose lengths depend on the values that the model is called with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from qtk.calls.call_recording import record_calls
from qtk.calls.calls import Call
from qtk.calls.served_sizes import Axis
from qtk.capture.prepared_model import PreparedGraph
from qtk.capture.restored import restored
from qtk.errors import OUT_OF_MEMORY
from qtk.torch_private import pytree


def varying_axes(
    model: nn.Module, calls: Sequence[Call], module: nn.Module, graph: PreparedGraph, axes: Collection[Axis]
) -> set[Axis]:
    """The ``axes`` whose length changes when the values of the model's inputs do: counts of boxes, of tokens.

    Args:
        model: the model, run with the elements of each input tensor in reverse and in random order.
        calls: the calls of the model.
        module: the submodule.
        graph: its graph, whose inputs the axes are of.
        axes: axes of its inputs.
    """
    if not axes:
        return set()
    varying: set[Axis] = set()
    placeholders = graph.graph.find_nodes(op="placeholder")
    for reorder in (_reversed, _shuffled):
        for call in _calls_of(model, calls, module, reorder):
            try:
                leaves = graph.leaves(call.args, call.kwargs)
            except Exception:  # of another kind
                continue
            for node, leaf in zip(placeholders, leaves, strict=True):
                varying |= {(name, axis) for name, axis in axes if name == node.target and isinstance(leaf, Tensor)
                            and leaf.shape[axis] != node.meta["val"].shape[axis]}
    return varying


def _calls_of(
    model: nn.Module, calls: Sequence[Call], module: nn.Module, reorder: Callable[[Tensor], Tensor]
) -> list[Call]:
    trees = [pytree.tree_map(lambda leaf: reorder(leaf) if isinstance(leaf, Tensor) else leaf, (call.args, call.kwargs))
             for call in calls]
    try:
        with restored(model):
            recorded = record_calls(model.eval(), [Call(args, kwargs, None) for args, kwargs in trees], of=[module])
    except OUT_OF_MEMORY:
        raise
    except Exception:  # values that the model refuses show nothing
        return []
    return recorded.get(module, [])


def _reversed(leaf: Tensor) -> Tensor:
    return leaf.flatten().flip(0).view(leaf.shape)


def _shuffled(leaf: Tensor) -> Tensor:
    order = torch.randperm(leaf.numel(), generator=torch.Generator().manual_seed(0)).to(leaf.device)
    return leaf.flatten()[order].view(leaf.shape)
