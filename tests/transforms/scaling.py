"""Applies the factors of channels to a copy of a model, in float64, and compares what it computes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import qtk
from qtk.calls.inputs import split_inputs
from qtk.channels.channel_scales import ChannelScales


def wide(value: Any) -> Any:
    """Every floating tensor of ``value`` in float64."""
    def widened(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(widened, value)


class Scaled:
    """A model in float64, prepared, with its channel scales on example inputs."""

    def __init__(self, model: nn.Module, inputs: Any, *, prepared: bool = False) -> None:
        self.args, self.kwargs = split_inputs(wide(inputs))
        self.model = model if prepared else prepare(model, wide(inputs))
        self.scales = ChannelScales(self.model, self.args, self.kwargs)

    def free_weights(self) -> set[str]:
        """Names of the weights whose input channels may all be scaled."""
        return {read.weight for read in self.scales.inputs if read.weight and bool((read.variables >= 0).all())}

    def pinned_weights(self) -> set[str]:
        """Names of the weights of which no input channel may be scaled."""
        return {read.weight for read in self.scales.inputs if read.weight and bool((read.variables < 0).all())}

    def reads(self, weight: str) -> Tensor:
        """The classes of the input channels of a weight."""
        (variables,) = {id(read): read.variables for read in self.scales.inputs if read.weight == weight}.values()
        return variables

    def writes(self, weight: str) -> Tensor:
        """The classes of the output channels of a parameter."""
        return next(write.variables for write in self.scales.outputs if write.weight == weight)

    def random_factors(self, *, clamped: bool = False) -> Tensor:
        """Factors between 1/4 and 4 of all free classes."""
        generator = torch.Generator().manual_seed(7)
        factors = torch.rand(self.scales.num_variables, generator=generator, dtype=torch.float64) * 4 - 2
        movable = self.scales.free if clamped else self.scales.free & ~self.scales.clamped
        return torch.where(movable, torch.exp2(factors), 1.0)

    def scaled(self, factors: Tensor) -> nn.Module:
        """A copy with the factors absorbed by its parameters."""
        return with_factors(self.model, self.scales.parameter_factors(factors))

    def error(self, changed: nn.Module) -> float:
        """Largest difference of outputs, relative to the largest output."""
        return difference(self.model, changed, self.args, self.kwargs)


def prepare(model: nn.Module, inputs: Any) -> qtk.PreparedModel:
    return qtk.prepare_model(model.double().eval(), inputs)


def with_factors(model: nn.Module, factors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of ``model`` with new parameters in place of those that change."""
    changed = copy.deepcopy(model)
    named = dict(changed.named_parameters())
    new = {id(named[name]): nn.Parameter(named[name].detach() * factor) for name, factor in factors.items()}
    for module in changed.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in new:
                module._parameters[name] = new[id(parameter)]
    return changed


def difference(before: nn.Module, after: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """Largest difference of outputs in eval mode, relative to the largest output."""
    with torch.no_grad():
        outputs = [pytree.tree_leaves(_plain(model.eval()(*args, **kwargs))) for model in (before, after)]
    worst = 0.0
    for a, b in zip(*outputs, strict=True):
        if isinstance(a, Tensor) and a.numel():
            assert a.shape == b.shape
            same = (a == b) | (a.isnan() & b.isnan())
            gap = torch.where(same, 0.0, (a.double() - b.double()).abs()).nan_to_num(nan=float("inf"))
            worst = max(worst, float(gap.max()) / max(float(a.double().abs().nan_to_num().max()), 1e-300))
    return worst


def _plain(value: Any) -> Any:
    return vars(value) if hasattr(value, "__dataclass_fields__") else value
