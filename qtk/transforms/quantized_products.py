"""Products of a value with weights, in float and as the plan quantizes them, computed by the ops of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from qtk.algorithms.smooth_quant import SmoothedInput, SmoothedProduct, SmoothedSite
from qtk.calibrators.min_max import MinMax
from qtk.calibrators.scheme import calibrator
from qtk.channels.channel_scales import WeightedInput
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerTensor, PerTokenBlock
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.spec import QuantSpec
from qtk.graph.evaluate import evaluate
from qtk.graph.flow import Flow, ancestors
from qtk.graph.sites import edge_site, ports, value_site
from qtk.numerics.ranges import choose_range
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Product
from qtk.operators.targets import attribute
from qtk.ops.simulate import simulate, simulate_dynamic
from qtk.transforms.input_statistics import InputStatistics, Sampling


def input_plan(item: WeightedInput, flow: Flow, plan: QuantPlan) -> SitePlan | None:
    """Says how the plan quantizes the value that a layer reads; ``None``: not at all."""
    for port in ports(item.node):
        if port.value is item.value and edge_site(port) in plan:
            return plan[edge_site(port)]
    return plan.get(value_site(flow.root(item.value)))


def sampling(item: WeightedInput, weight: Tensor) -> Sampling:
    """Returns what of the input of a layer may be left out: rows of a matrix product, samples of a convolution."""
    value = item.value.meta["val"]
    row = row_of(item.node)
    assert row is not None
    is_last = item.channel_axis % value.ndim == value.ndim - 1
    if row.product in (Product.OUT_IN, Product.IN_OUT):
        return Sampling.ROWS if is_last and weight.ndim == 2 and row.kind != "baddbmm" else Sampling.WHOLE
    return Sampling.MAPS if value.ndim == weight.ndim else Sampling.WHOLE


def multiplications(item: WeightedInput, product: SmoothedProduct, x: Tensor) -> float:
    """Says how many multiplications a layer makes for each element of its input ``x``."""
    row = row_of(item.node)
    weight = product.weight
    if row is not None and row.product is Product.CONV:
        outputs = product.exact(x, weight).numel()
        return outputs * (weight.numel() // weight.shape[0]) / x.numel()
    return weight.numel() / len(item.variables)


def product(item: WeightedInput, weight: Tensor, flow: Flow, plan: QuantPlan) -> SmoothedProduct:
    """The product that ``item`` enters, with the parameter ``weight``."""
    assert item.weight_index is not None
    port, source = next(
        (port, read) for port in ports(item.node) if port.value is not item.value and flow.is_static(port.value)
        for read in (port.value, *ancestors([port.value])) if _is_read_of(read, weight)
    )
    known = {value: _nothing(value, weight) for value in item.node.all_input_nodes
             if value is not item.value and not flow.is_static(value)}
    sites = {edge_site(port): port.value, value_site(flow.root(port.value)): flow.root(port.value),
             value_site(port.value): port.value}
    rounded_at, decided = next(((node, plan[site]) for site, node in sites.items() if site in plan), (None, None))

    def exact(x: Tensor, parameter: Tensor) -> Tensor:
        return _evaluated(item.node, {**known, item.value: x, source: parameter})

    def rounded(x: Tensor, parameter: Tensor) -> Tensor:
        values: dict[fx.Node, object] = {**known, item.value: x, source: parameter}
        if rounded_at is not None and decided is not None:
            values[rounded_at] = _min_max_rounded(_evaluated(rounded_at, values), decided.spec)
        return _evaluated(item.node, values)

    return SmoothedProduct(weight.detach(), item.weight_index.to(weight.device), exact, rounded)


def smoothed_input(
    items: Sequence[WeightedInput], products: Sequence[SmoothedProduct], decided: SitePlan | None, variable: Tensor,
    statistics: InputStatistics,
) -> SmoothedInput:
    """One value with all layers that read it, ready for measuring errors.

    Args:
        items: the readings of the value.
        products: their products.
        decided: how the value is quantized.
        variable: as for ``SmoothedInput``.
        statistics: of the value.
    """
    axis = items[0].channel_axis
    samples = statistics.samples
    if samples and samples[0].ndim != items[0].value.meta["val"].ndim:
        axis = -1  # rows
    return SmoothedInput(samples, axis, variable, _rounding(decided, statistics, axis), products)


def _rounding(
    decided: SitePlan | None, statistics: InputStatistics, axis: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """Quantizes a smoothed value, given the scale that it was divided by, in the range that calibration would find.

    Blocks are along ``axis``, the channel axis: samples may be rows of the value.
    """
    if decided is None:
        return lambda x, scale: x
    spec = decided.spec
    if isinstance(spec.granularity, PerTokenBlock):
        rank = statistics.samples[0].ndim if statistics.samples else 1
        spec = replace(spec, granularity=PerTokenBlock(spec.granularity.length, axis % rank - rank))
    if spec.dynamic:
        return lambda x, scale: simulate_dynamic(x, spec)
    scheme = calibrator(decided.scheme)
    if isinstance(scheme, MinMax) and isinstance(spec.granularity, PerTensor | PerTokenBlock):
        low, high = statistics.range

        def in_extremes(x: Tensor, scale: Tensor) -> Tensor:
            smallest, largest = (low / scale).amin().reshape(1), (high / scale).amax().reshape(1)
            return simulate(x, spec, *choose_range(smallest, largest, spec))

        return in_extremes

    def in_scheme(x: Tensor, scale: Tensor) -> Tensor:
        observer = scheme.observer(spec.granularity)
        for rows in statistics.rows:
            observer.observe((rows / scale).to(rows.dtype))
        (encoding,) = scheme.encodings([observer], [spec])
        return _simulated(x, encoding)

    return in_scheme


def smoothed_site(decided: SitePlan, variable: Tensor, statistics: InputStatistics) -> SmoothedSite:
    """A quantized value, ready for measuring errors: rounded in the range that its scheme finds for each sample.

    Args:
        decided: how the value is quantized.
        variable: as for ``SmoothedSite``.
        statistics: of the value.
    """
    scheme = calibrator(decided.scheme)

    def rounded(x: Tensor) -> Tensor:
        observer = scheme.observer(decided.spec.granularity)
        observer.observe(x)
        (encoding,) = scheme.encodings([observer], [decided.spec])
        return _simulated(x, encoding)

    finite = [x for x in statistics.samples if bool(x.isfinite().all())]
    return SmoothedSite(finite, variable, rounded)


def _min_max_rounded(weight: Tensor, spec: QuantSpec) -> Tensor:
    """A weight quantized in the range of its values."""
    if spec.dynamic:
        return simulate_dynamic(weight, spec)
    observer = MinMax().observer(spec.granularity, static=True)
    observer.observe(weight)
    (encoding,) = MinMax().encodings([observer], [spec])
    return _simulated(weight, encoding)


def _simulated(x: Tensor, encoding: Encoding) -> Tensor:
    return simulate(x, encoding.spec, encoding.scale, encoding.zero_point)


def _evaluated(node: fx.Node, known: dict[fx.Node, object]) -> Tensor:
    with torch.no_grad():
        result = evaluate(node, dict(known))
    assert isinstance(result, Tensor)
    return result


def _nothing(value: fx.Node, weight: Tensor) -> Tensor:
    """A zero in place of a value that is added to the product."""
    return torch.zeros((), dtype=value.meta["val"].dtype, device=weight.device)


def _is_read_of(node: fx.Node, tensor: Tensor) -> bool:
    owner = node.graph.owning_module
    return node.op == "get_attr" and owner is not None and attribute(owner, str(node.target)) is tensor
