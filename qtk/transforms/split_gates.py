"""Writes SiLU and hardswish of images as what they are, a value times its gate, so that both can be quantized.

SiLU is x · sigmoid(x), hardswish x · hardsigmoid(x). Runtimes without an integer kernel for the whole function have one
for each of the two ops.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from qtk.capture.prepared_model import PreparedModel
from qtk.graph.graphs import roots
from qtk.graph.sites import OP, OWNER, add_labels, join, label
from qtk.planning.image_gates import is_image_gate

_ATEN = torch.ops.aten

GATES: dict[object, Callable[..., object]] = {
    _ATEN.silu.default: _ATEN.sigmoid.default, _ATEN.hardswish.default: _ATEN.hardsigmoid.default,
}


def split_gates(model: PreparedModel) -> None:
    """Replaces SiLU and hardswish of images by a gate and a product. Changes ``model``, before it has quantizers.

    The product keeps the site of the function, ``act:out``; the gate has ``act.gate:out``.
    """
    for module in roots(model).values():
        for node in list(module.graph.nodes):
            if node.target in GATES and is_image_gate(node):
                _split(node)
        module.recompile()


def _split(node: fx.Node) -> None:
    with node.graph.inserting_before(node):
        gate = node.graph.call_function(GATES[node.target], (node.args[0],))
    gate.meta = dict(node.meta)
    add_labels(gate, **{OWNER: label(node, OWNER) or "", OP: join(label(node, OP) or "", "gate")})
    node.target, node.args, node.kwargs = _ATEN.mul.Tensor, (node.args[0], gate), {}
