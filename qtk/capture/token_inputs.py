"""Finds the inputs of a call that have tokens, and follows these through the graph that it runs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx

from qtk.capture.inputs import input_leaves
from qtk.errors import CaptureError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.token_layouts import TokenLayouts
from qtk.numerics.token_layout import TokenLayout
from qtk.torch_private import length_hint


class TokenInputs:
    """The layouts of the graphs of a model, for calls in which the same inputs have tokens."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[fx.Node, ...], TokenLayouts] = {}

    def followed(
        self, graph: CapturedGraph, args: tuple[object, ...], kwargs: Mapping[str, object], valid: Tensor
    ) -> TokenLayouts | None:
        """The layouts of a call of ``graph`` whose inputs [samples, tokens, …] are as long as ``valid``.

        Args:
            graph: a captured graph.
            args: positional arguments of the call.
            kwargs: its keyword arguments.
            valid: bool [samples, tokens].

        Returns: ``None`` if no input is, or the arguments are not those of the graph.
        """
        try:
            leaves = input_leaves(graph.graph, args, kwargs)
        except CaptureError:
            return None
        inputs = [
            node for node, leaf in zip(graph.graph.find_nodes(op="placeholder"), leaves, strict=True)
            if isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[:2] == valid.shape
        ]
        if not inputs:
            return None
        key = tuple(inputs)
        if key not in self._layouts:
            self._layouts[key] = TokenLayouts(graph, {node: _layout(node) for node in inputs})
        return self._layouts[key]


def _layout(node: fx.Node) -> TokenLayout:
    shape = node.meta["val"].shape
    return TokenLayout.of_shape([length_hint(each) for each in shape], [isinstance(each, int) for each in shape])
