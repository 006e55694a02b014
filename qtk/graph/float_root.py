"""The float value behind a value: before its quantizers, and before what moves it."""

from __future__ import annotations

from torch import fx

from qtk.graph.flow import Flow
from qtk.graph.insert import quantizer_called


def float_root(flow: Flow, node: fx.Node) -> fx.Node:
    """The node that computed what ``node`` holds, quantized or not: layers that read the same have one in common."""
    root = flow.root(node)
    while quantizer_called(root) is not None:
        root = flow.root(root.all_input_nodes[0])
    return root
