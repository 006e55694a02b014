"""Layers of real simulations with inputs of both paths, and their errors with every output formed, in float64."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

import qtk
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.layerwise.layer_state import LayerState
from qtk.layerwise.weighted_layers import WeightedLayer, weighted_layers
from qtk.moments.required_statistics import RequiredStatistics
from qtk.moments.second_moments import SecondMoments
from qtk.numerics.ranges import choose_range

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(16, 6), (60, 16)),
    "conv": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 4, 7, 7)),
    "grouped": (lambda: nn.Conv2d(8, 6, 3, dilation=2, groups=2), (4, 8, 7, 7)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), (4, 4, 5, 5)),
    "transposed grouped": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (4, 4, 5, 5)),
}
TENSOR, CHANNEL = {"granularity": "per_tensor"}, {"granularity": "per_channel"}


def blocks_of(length: int) -> dict[str, object]:
    return {"granularity": "per_block", "block_size": length}


@dataclass(frozen=True, eq=False)
class Case:
    """A layer as layer-wise steps get it, and what they do not see."""

    problem: LayerState
    module: nn.Module
    original: Tensor
    quantized: Tensor

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        """The layer's outputs with a weight, less the bias. Shape: [outputs, rest], float64."""
        with torch.no_grad():
            out = functional_call(self.module, {"weight": weight.double()}, (x.double(),))
        return out.movedim(-1 if isinstance(self.module, nn.Linear) else 1, 0).flatten(1)

    def lost(self, rounded: Tensor, mask: Tensor | float = 1.0) -> float:
        """|X w - X̂ ŵ|², of all outputs; of what the weights in a mask put into them."""
        own, near = self.problem.float_weight.double() * mask, rounded.double() * mask
        return float((self.run(self.original, own) - self.run(self.quantized, near)).square().sum())

    def rounded(self, encoding: Encoding) -> Tensor:
        """The weight rounded, by the formula. Shape: as the weight, float64."""
        return rounded(self.problem.float_weight, encoding)

    def lost_by_scale(self, near: Tensor) -> Tensor:
        """Each scale's part. Shape: that of the scale, float64."""
        scale = self.problem.encoding.scale
        owner = everywhere(torch.arange(scale.numel()).reshape(scale.shape), self.problem.encoding.spec, near.shape)
        return torch.tensor([self.lost(near, (owner == one).double()) for one in range(scale.numel())],
                            dtype=torch.float64).reshape(scale.shape)


def rounded(weight: Tensor, encoding: Encoding) -> Tensor:
    scale = everywhere(encoding.scale, encoding.spec, weight.shape)
    zero = torch.zeros(()) if encoding.zero_point is None else everywhere(
        encoding.zero_point, encoding.spec, weight.shape
    )
    code = ((weight.float() / scale).round() + zero).clamp(encoding.spec.qmin, encoding.spec.qmax)
    return (code - zero).double() * scale.double()


def everywhere(values: Tensor, spec: QuantSpec, shape: torch.Size) -> Tensor:
    """Numbers of scales at every weight, by repeating them. Shape: ``shape``."""
    sizes = spec.granularity.block_size(len(shape)) or (-1,) * len(shape)
    counts = [1 if size == -1 else length // size for length, size in zip(shape, sizes, strict=True)]
    wide = values.reshape(counts)
    for axis, (length, count) in enumerate(zip(shape, counts, strict=True)):
        wide = wide.repeat_interleave(length // count, axis)
    return wide


def case(
    layer: WeightedLayer, module: nn.Module, x: Tensor, *, noise: float = 0.2, block: int | None = None,
    spec: QuantSpec | None = None, dtype: torch.dtype = torch.float64,
) -> Case:
    """A layer and its input.

    Args:
        layer: of the simulation.
        module: the float one.
        x: the float input.
        noise: on the quantized path's input; 0: both paths have one.
        block: of the moments, ``None``: whole.
        spec: in place of the config's.
        dtype: to compute in.
    """
    moments = SecondMoments(layer.geometry, RequiredStatistics(block, dtype=dtype))
    quantized = x + noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    moments.observe(quantized, x if noise else None)
    problem = LayerState.of(layer, moments, dtype)
    if spec is not None:
        problem = replace(problem, encoding=Encoding(spec, *choose_range(*extremes(problem.weight, spec), spec)))
    exact = copy.deepcopy(module).double()
    exact.bias = None
    return Case(problem, exact, x, quantized if noise else x)


def layer_of(module: nn.Module, x: Tensor, weight: Mapping[str, object]) -> WeightedLayer:
    """The layer of a simulation in 4 bits, or those of the setting of its config, with ranges of min_max."""
    rules = [{"match": {"path": "*"}, "weight": {"scheme": "min_max"}}]
    sim = qtk.QuantSim(module.eval(), x, weight_bits=qtk.FROM_CONFIG if "dtype" in weight else 4, activation_bits=None,
                       config={"version": 1, "defaults": {"weight": dict(weight)}, "rules": rules})
    sim.compute_encodings(None, progress=False)
    (layer,), skipped = weighted_layers(sim.model, sim.plan)
    assert not skipped
    return layer


def extremes(weight: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Least and largest weight of each scale."""
    shape = spec.granularity.qparam_shape(tuple(weight.shape))
    owner = everywhere(torch.arange(torch.Size(shape).numel()), spec, weight.shape).flatten()
    low, high = (torch.zeros(torch.Size(shape).numel()).scatter_reduce(0, owner, weight.flatten(), way)
                 for way in ("amin", "amax"))
    return low.reshape(shape), high.reshape(shape)


@functools.cache
def _built(name: str, weight: tuple[tuple[str, object], ...]) -> tuple[WeightedLayer, nn.Module, Tensor]:
    build, shape = LAYERS[name]
    module, generator = build(), torch.Generator().manual_seed(2)
    few_large_(module, generator)
    x = torch.randn(shape, generator=generator) + 0.3
    return layer_of(module, x, dict(weight)), module, x


def few_large_(module: nn.Module, generator: torch.Generator) -> None:
    """Gives it weights of which few are large, so that smaller ranges are better."""
    with torch.no_grad():
        module.weight.copy_(torch.randn(module.weight.shape, generator=generator) ** 3)


def named(name: str, weight: Mapping[str, object], **settings: object) -> Case:
    """One of ``LAYERS``; its simulation is made once."""
    return case(*_built(name, tuple(weight.items())), **settings)
