"""The ops of ``quantized_decomposed`` as Core AI's operators quantize and dequantize.

``q = round(x / scale) + offset1``, half to even, clamped to the codes of the type, and ``x̂ = (q − offset1) · scale +
offset2``; offset2 is 0. The scale divides, as in the simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

Lowering = Callable[[dict[str, Any], fx.Node, Any], Any]
"""Core AI's values by the names of their nodes, the node, its location → Core AI's value of the node."""


class SiteLowerings:
    """Lowers the ops of the sites of a program; scales and zero points are taken from the program.

    Args:
        program: the program that is converted.
    """

    def __init__(self, program: ExportedProgram) -> None:
        signature = program.graph_signature
        kept = {**program.state_dict, **program.constants}
        targets = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
        self._tensors = {name: kept[target] for name, target in targets.items() if target in kept}

    @property
    def by_op(self) -> dict[str, Lowering]:
        """Qualified name of an op → what lowers it."""
        return {f"quantized_decomposed::{name}_{granularity}.default": partial(lower, name)
                for name in ("quantize", "dequantize")
                for granularity, lower in (("per_tensor", self._per_tensor), ("per_channel", self._per_channel))}

    def _per_tensor(self, name: str, values: dict[str, Any], node: fx.Node, location: Any) -> Any:
        value, scale, zero_point, _, _, dtype = _arguments(node)
        return _operator(name, values[value.name], torch.tensor(scale), torch.tensor(zero_point), 0, dtype, location)

    def _per_channel(self, name: str, values: dict[str, Any], node: fx.Node, location: Any) -> Any:
        value, scale, zero_point, axis, _, _, dtype = _arguments(node)
        scales, zero_points = self._tensors[scale.name], self._tensors[zero_point.name]
        return _operator(name, values[value.name], scales, zero_points, axis, dtype, location)


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _operator(
    name: str, value: Any, scale: Tensor, zero_point: Tensor, axis: int, dtype: torch.dtype, location: Any
) -> Any:
    from coreai._compiler.dialects import coreai  # its only way to make operators

    reals = scale.detach().cpu().to(torch.float32).numpy()
    constants = reals, zero_point.detach().cpu().to(dtype).numpy(), np.zeros_like(reals), np.array(axis, np.int32)
    return getattr(coreai, name)(value, *(coreai.constant(each, loc=location) for each in constants), loc=location)
