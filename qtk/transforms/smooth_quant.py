"""SmoothQuant on a captured graph: which channels are scaled together, by how much, and whether it helps.

Xiao et al., arXiv 2211.10438. ``ChannelScales`` says which channels of the inputs of layers may be scaled, and which
parameters absorb the factors; layers whose inputs share a channel form a group with one alpha. With ``alpha="auto"`` a
group is scaled if the outputs of its layers come closer to float on data that neither ranges nor scales have seen.

Where no factor may go (behind GELU or softmax, in front of a residual connection), a multiplication is inserted in
front of all layers that read the value, whatever alpha, only if it lowers the error by ``LEAST_GAIN_DB``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from tqdm import tqdm

from qtk.algorithms.smooth_quant import ScaleChoice, SmoothedInput, SmoothedSite, output_error, search, smoothing_scale
from qtk.calibrators.min_max import MinMax
from qtk.calibrators.scheme import calibrator
from qtk.channels.channel_scales import ChannelScales, WeightedInput
from qtk.core.granularity import PerTensor
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.site import Site
from qtk.data.valid_tokens import ValidTokens
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.flow import Flow
from qtk.graph.sites import edge_site, ports, value_site
from qtk.transforms.input_statistics import InputStatistics, Sampling, TappedValue, gathering
from qtk.transforms.inserted_scales import inserting_steps, reason_against
from qtk.transforms.named_tensors import NamedTensors
from qtk.transforms.proof import Group
from qtk.transforms.quantized_products import (
    input_plan,
    multiplications,
    product,
    sampling,
    smoothed_input,
    smoothed_site,
)
from qtk.transforms.steps import ScaleParameter, Step
from qtk.transforms.touched_sites import sites_of_parameters, sites_of_values

LEAST_GAIN_DB = 3.0
"""By how much an inserted multiplication must lower the error: to a half."""

SHOWN = 4
"""Parameters that a result names."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadValue:
    """A value that layers multiply with their weights.

    Args:
        readings: its readings by layers, all with the same channel axis.
        weights: their weights.
        variables: int64 [C], the variable of every channel; -1 where its factor must be 1.
        flow: of the graph.
        decided: how the value is quantized; ``None``: it stays in float.
        tapped: the value, to gather statistics of.
    """

    readings: tuple[WeightedInput, ...]
    weights: tuple[Tensor, ...]
    variables: Tensor
    flow: Flow
    decided: SitePlan | None
    tapped: TappedValue

    @property
    def name(self) -> str:
        """The site of the value."""
        return value_site(self.flow.root(self.tapped.node)).name


@dataclass(frozen=True, slots=True, eq=False)
class ScaledSite:
    """A quantized value whose channels are scaled, and which is read by other ops than layers too.

    Args:
        variables: int64, broadcastable to the value: the variable of every element, -1 where its factor must be 1.
        decided: how the value is quantized.
        tapped: the value, to take samples of.
    """

    variables: Tensor
    decided: SitePlan
    tapped: TappedValue


class SmoothQuant:
    """The groups of layers of one model that SmoothQuant may scale, their statistics, and the steps that scale them.

    Args:
        model: a prepared model without quantizers.
        scales: of the model.
        plan: how it is quantized.
    """

    def __init__(self, model: nn.Module, scales: ChannelScales, plan: QuantPlan) -> None:
        self._model = model
        self._scales = scales
        self._plan = plan
        self._members = NamedTensors(model)
        self.values = self._read_values()
        self.scaled_sites = list(self._read_sites())
        self._statistics: dict[ReadValue | ScaledSite, InputStatistics] = {}

    @property
    def sites(self) -> list[Site]:
        """The sites of all values and weights that parameters may absorb factors of, in graph order."""
        free = [value for value in self.values if bool((value.variables >= 0).any())]
        sites = [value_site(value.flow.root(value.tapped.node)) for value in free]
        weights = [item.weight for value in free for item in value.readings if item.weight is not None]
        return [*sites, *map(Site.parameter, dict.fromkeys(weights))]

    @property
    def places(self) -> dict[fx.Node, str]:
        """The nodes whose values are gathered → the names of their sites."""
        nodes = [value.tapped.node for value in self.values] + [site.tapped.node for site in self.scaled_sites]
        return {node: value_site(node).name for node in nodes}

    @contextmanager
    def gathering(self, tokens: ValidTokens | None = None) -> Iterator[None]:
        """Gathers statistics of all values, of the valid ``tokens``, while the body runs the model over data."""
        gathered: list[ReadValue | ScaledSite] = [*self.values, *self.scaled_sites]
        with gathering(self._model, [each.tapped for each in gathered], tokens) as statistics:
            yield
        self._statistics = dict(zip(gathered, statistics, strict=True))

    def groups(self, alpha: float | None, *, progress: bool = False) -> list[Group]:
        """The steps of every group that is to be scaled, and the reasons for the others.

        Requires: statistics are gathered.

        Args:
            alpha: the migration strength; ``None``: the best of a grid for every group, or none.
            progress: show a bar.
        """
        components = tqdm(self._components(), desc="smoothing", unit="group", disable=not progress)
        return [self._group(values, alpha) for values in components]

    def _read_values(self) -> list[ReadValue]:
        readings: dict[tuple[CapturedGraph, object, int], list[WeightedInput]] = {}
        flows: dict[CapturedGraph, Flow] = {}
        seen = set()
        for item in self._scales.inputs:
            key = (item.graph, item.node, item.value, item.weight)  # a graph may be called with several shapes
            if item.weight is not None and key not in seen:
                seen.add(key)
                flows.setdefault(item.graph, Flow(item.graph.graph))
                readings.setdefault((item.graph, item.value, item.channel_axis), []).append(item)
        values = []
        for (graph, _, axis), items in readings.items():
            weights = tuple(self._members.tensor(item.weight) for item in items if item.weight is not None)
            decided = input_plan(items[0], flows[graph], self._plan)
            kinds = {sampling(item, weight) for item, weight in zip(items, weights, strict=True)}
            tapped = TappedValue(
                graph, items[0].value, axis, max(kinds, key=lambda kind: kind.strictness),
                keeps_rows=decided is not None and not isinstance(calibrator(decided.scheme), MinMax),
            )
            variables = items[0].variables
            bounded = (variables >= 0) & self._scales.clamped[variables]  # by a ReLU6: its bounds stay
            variables = variables.where(~bounded, -1)
            values.append(ReadValue(tuple(items), weights, variables, flows[graph], decided, tapped))
        return values

    def _read_sites(self) -> Iterator[ScaledSite]:
        layers = {item.node for item in self._scales.inputs}
        flows: dict[object, Flow] = {}
        for node, variables in self._scales.values.items():
            graph = node.graph.owning_module
            assert isinstance(graph, CapturedGraph)
            decided, flow = self._plan.get(value_site(node)), flows.setdefault(graph, Flow(graph.graph))
            if decided is None or decided.static or decided.leader is not None or decided.spec.dynamic:
                continue
            is_read = any(port.user not in layers for port in flow.readers(node))
            if is_read and isinstance(decided.spec.granularity, PerTensor):
                sampling = Sampling.MAPS if variables.ndim > 1 and len(variables) == 1 else Sampling.WHOLE
                yield ScaledSite(variables, decided, TappedValue(graph, node, -1, sampling, is_input=False))

    def _components(self) -> list[list[ReadValue]]:
        """The values that share a variable, directly or through others; values without any by themselves."""
        components: list[tuple[set[int], list[ReadValue]]] = []
        for value in self.values:
            variables = {variable for variable in value.variables.tolist() if variable >= 0}
            touching = [component for component in components if variables & component[0]]
            merged = (variables.union(*(own for own, _ in touching)), [v for _, vs in touching for v in vs] + [value])
            components = [component for component in components if component not in touching] + [merged]
        order = {value: index for index, value in enumerate(self.values)}
        return sorted((values for _, values in components), key=lambda values: order[values[0]])

    def _group(self, values: list[ReadValue], alpha: float | None) -> Group:
        name = values[0].name + (f" and {len(values) - 1} more" if len(values) > 1 else "")
        statistics = [self._statistics[value] for value in values]
        reason = _reason_to_leave(values, statistics)
        if reason is not None:
            return Group(name, (), reason)
        if any(bool((value.variables >= 0).any()) for value in values):
            return self._folded(name, values, statistics, alpha)
        return self._inserted(name, values[0], statistics[0], alpha)

    def _folded(
        self, name: str, values: list[ReadValue], statistics: list[InputStatistics], alpha: float | None
    ) -> Group:
        """The group of values that share variables: parameters absorb their factors."""
        variables = torch.cat([value.variables for value in values]).tolist()
        numbering = torch.tensor(sorted({variable for variable in variables if variable >= 0}))
        numbers = [_numbers(value.variables, numbering) for value in values]
        factors = torch.ones(self._scales.num_variables, dtype=torch.float64)
        factors[numbering] = 2.0
        scaled = self._scales.scaled_values(factors)
        fixed = [site for node in scaled if _is_fixed(self._plan.get(site := value_site(node)))]
        if fixed:
            return Group(name, (), f"the config fixes the range of {fixed[0]}")
        inputs = [self._smoothed(*each) for each in zip(values, numbers, statistics, strict=True)]
        choice = self._choice(values, inputs, statistics, len(numbering), alpha, self._smoothed_sites(numbering))
        if choice.alpha is None:
            return Group(name, (), "no alpha lowers the error", (), choice.before, choice.before)
        factors[numbering] = 1 / choice.scale.cpu()
        changed = self._scales.parameter_factors(factors)
        weights = {item.weight for value in values for item in value.readings}
        producers = [parameter for parameter in changed if parameter not in weights] or list(changed)
        shown = ", ".join(producers[:SHOWN]) + (f" and {len(producers) - SHOWN} more" if len(producers) > SHOWN else "")
        steps = tuple(ScaleParameter(parameter, factor) for parameter, factor in changed.items())
        sites = sites_of_values(scaled) | sites_of_parameters(self._model, changed)
        return _scaled(name, steps, tuple(sites), choice, f"into {shown}", statistics)

    def _inserted(self, name: str, value: ReadValue, statistics: InputStatistics, alpha: float | None) -> Group:
        """The group of the layers that read one value whose channels are pinned: a multiplication is inserted."""
        own = torch.arange(len(value.variables))
        smoothed = self._smoothed(value, own, statistics)
        samples = statistics.samples[0]
        work = sum(multiplications(item, each, samples)
                   for item, each in zip(value.readings, smoothed.products, strict=True))
        reason = reason_against(self._model, value.readings, value.weights, value.decided, work, value.flow)
        if reason is not None:
            return Group(name, (), reason)
        choice = self._choice([value], [smoothed], [statistics], len(own), alpha)
        if choice.gain_db < LEAST_GAIN_DB:
            gain = f"{choice.gain_db:.1f} dB"
            reason = f"a multiplication would lower the error by {gain}, {LEAST_GAIN_DB:g} dB are required"
            return Group(name, (), reason, (), choice.before, choice.before)
        steps = tuple(inserting_steps(self._model, value.readings, choice.scale))
        where = (f"by a multiplication of {statistics.elements} elements, "
                 f"1/{work:.0f} of the multiplications of its layers")
        changed = {item.weight for item in value.readings}
        sites = {edge_site(port) for item in value.readings for port in ports(item.node)}
        sites |= sites_of_parameters(self._model, changed)
        return _scaled(name, steps, tuple(sites), choice, where, [statistics])

    def _smoothed(self, value: ReadValue, own: Tensor, statistics: InputStatistics) -> SmoothedInput:
        products = [product(item, weight, value.flow, self._plan)
                    for item, weight in zip(value.readings, value.weights, strict=True)]
        own = own.to(value.weights[0].device)
        return smoothed_input(value.readings, products, value.decided, own, statistics)

    def _smoothed_sites(self, numbering: Tensor) -> list[SmoothedSite]:
        sites = []
        for site in self.scaled_sites:
            own = _numbers(site.variables, numbering)
            if bool((own >= 0).any()):
                own = own.to(next(self._model.parameters()).device)
                sites.append(smoothed_site(site.decided, own, self._statistics[site]))
        return [site for site in sites if site.samples]

    def _choice(
        self, values: Sequence[ReadValue], inputs: Sequence[SmoothedInput], statistics: Sequence[InputStatistics],
        count: int, alpha: float | None, sites: Sequence[SmoothedSite] = (),
    ) -> ScaleChoice:
        device = values[0].weights[0].device
        input_absmax, weight_absmax = torch.zeros(2, count, dtype=torch.float64, device=device)
        for each, gathered in zip(inputs, statistics, strict=True):
            low, high = gathered.range
            _raise_to(input_absmax, each.variable, torch.maximum(-low, high))
            for factor in each.products:
                numbered = torch.where(factor.channel >= 0, each.variable[factor.channel], -1)
                _raise_to(weight_absmax, numbered, _absmax_like(factor.weight, factor.channel))
        if alpha is None:
            return search([*inputs, *sites], input_absmax, weight_absmax)
        scale = smoothing_scale(input_absmax, weight_absmax, alpha)
        errors = [output_error([*inputs, *sites], candidate) for candidate in (torch.ones_like(scale), scale)]
        return ScaleChoice(scale, alpha, *errors)


def _reason_to_leave(values: Sequence[ReadValue], statistics: Sequence[InputStatistics]) -> str | None:
    """Says why a group is not scaled; ``None`` if nothing speaks against it."""
    for value, each in zip(values, statistics, strict=True):
        if not each.is_complete:
            return f"no data reached {value.name}"
        if _is_fixed(value.decided):
            return f"the config fixes the range of {value.name}"
    return None


def _is_fixed(decided: SitePlan | None) -> bool:
    return decided is not None and (decided.range is not None or decided.bounds is not None)


def _scaled(
    name: str, steps: tuple[Step, ...], sites: tuple[Site, ...], choice: ScaleChoice, where: str,
    statistics: Sequence[InputStatistics],
) -> Group:
    detail = f"alpha {choice.alpha:g}, {choice.gain_db:.1f} dB, {where}"
    if not all(each.is_held_out for each in statistics):
        detail += "; chosen on the data of the statistics, which cannot be divided"
    return Group(name, steps, detail, sites, choice.before, choice.after)


def _numbers(variables: Tensor, numbering: Tensor) -> Tensor:
    """Position of every variable in ``numbering``, which is sorted; -1 for variables that are not in it."""
    position = torch.searchsorted(numbering, variables.contiguous()).clamp(max=len(numbering) - 1)
    return torch.where(numbering[position] == variables, position, -1)


def _raise_to(maximum: Tensor, index: Tensor, values: Tensor) -> None:
    """Raises the elements of ``maximum`` at ``index`` to ``values``, where that is more; -1 indexes nothing."""
    counted = index >= 0
    maximum.scatter_reduce_(0, index[counted], values[counted].to(maximum.dtype), "amax")


def _absmax_like(weight: Tensor, channel: Tensor) -> Tensor:
    """The largest |weight| over the axes along which ``channel`` does not vary. Shape: as ``channel``."""
    rank = weight.ndim
    lined = [1] * (rank - channel.ndim) + list(channel.shape)
    reduced = [axis for axis in range(rank) if lined[axis] == 1 and weight.shape[axis] > 1]
    absmax = weight.detach().abs()
    return (absmax.amax(reduced, keepdim=True) if reduced else absmax).reshape(channel.shape)


