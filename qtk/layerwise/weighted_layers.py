"""Layers whose output is a matrix product of an input and a quantized parameter, which layer-wise methods improve."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx, nn

from qtk.core.plan import QuantPlan
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_called
from qtk.graph.sites import Port
from qtk.layerwise.output_parts import Use, output_parts
from qtk.layerwise.parameter_view import ParameterView, parameter_view
from qtk.layerwise.stack_bias import stack_bias
from qtk.moments.stack_use import NotALayer, StackUse, stack_use
from qtk.numerics.im2col import Geometry
from qtk.operators.lookup import op_name, row_of
from qtk.operators.op_row import OpRow, Product
from qtk.operators.targets import attribute, schema_arguments
from qtk.quantizers.quantizer import Quantizer


@dataclass(frozen=True, slots=True, eq=False)
class WeightedLayer:
    """A quantized weight with all its uses.

    Args:
        name: of the weight's site, ``blocks.0.attn.qkv.weight``.
        geometry: how the layer multiplies it with its input.
        weight: the parameter.
        bias: the parameter added to the output, ``None`` where there is none; of a stack a row for each matrix.
        quantizer: of the weight.
        activation: the elementwise function that alone reads the output, if there is one.
        view: how it is stored in a parameter; ``None``: it is one.
        bias_moves: the ops that move the bias, of a stack.
        uses: op → how it multiplies the weight, where that is moved before, a stack, or the left factor.
    """

    name: str
    geometry: Geometry
    weight: Tensor
    bias: Tensor | None
    quantizer: Quantizer
    activation: Callable[[Tensor], Tensor] | None = None
    uses: dict[fx.Node, StackUse] = field(default_factory=dict)
    view: ParameterView | None = None
    bias_moves: tuple[fx.Node, ...] = ()

    @property
    def parameter(self) -> Tensor:
        """The parameter in whose memory the weight is."""
        return self.weight if self.view is None else self.view.parameter

    @property
    def moves(self) -> set[fx.Node]:
        """The ops that move the weight, before and after its quantizer, and the bias."""
        before = () if self.view is None else self.view.moves
        return {*before, *self.bias_moves, *(move for use in self.uses.values() for move in use.moves)}

    @property
    def matrices(self) -> int | None:
        """Says how many matrices the weight is a stack of, each with rows of its own; ``None`` of other layers."""
        return self.geometry.groups if self.geometry.axes is not None and self.geometry.groups > 1 else None


def weighted_layers(model: nn.Module, plan: QuantPlan) -> tuple[list[WeightedLayer], dict[str, str]]:
    """The layers of a model with quantizers, in graph order, and the reason for every weight that is of no layer."""
    layers: dict[str, WeightedLayer] = {}
    skipped: dict[str, str] = {}
    shared = {decided.leader.name for decided in plan.values() if decided.leader is not None}
    readers = _readers_of_parameters(model)
    uses_of: dict[Quantizer, list[tuple[fx.GraphModule, Use]]] = {}
    for graph, use, quantizer in _uses(model):
        uses_of.setdefault(quantizer, []).append((graph, use))
    for quantizer, uses in uses_of.items():
        try:
            for flow, _, port in (use for _, use in uses):
                _check_readers(flow, port)
            parts = output_parts(use for _, use in uses)
            for graph, (flow, row, port) in uses:
                layer = _layer(graph, flow, row, port, quantizer, shared, parts)
                if not _is_read_by(quantizer, layer, readers[id(layer.parameter)]):
                    raise NotALayer("is read in another format, or in float, by other ops too")
                known = layers.setdefault(quantizer.site, layer)
                if known.geometry != layer.geometry:
                    raise NotALayer(f"is used in two ways, {known.geometry} and {layer.geometry}")
                known.uses.update(layer.uses)
        except NotALayer as reason:
            skipped[quantizer.site] = str(reason)
    return [layer for name, layer in layers.items() if name not in skipped], skipped


def _uses(model: nn.Module) -> Iterator[tuple[fx.GraphModule, Use, Quantizer]]:
    """Every product with a quantized weight, its graph and the quantizer, in graph order."""
    for graph in graphs(model).values():
        flow = Flow(graph.graph)
        for node in graph.graph.nodes:
            row = flow.row(node)
            for port in flow.weight_ports(node) if row is not None and row.weight_axes is not None else ():
                quantizer = quantizer_called(flow.root(port.value))
                if quantizer is not None:
                    assert row is not None
                    yield graph, (flow, row, port), quantizer


def _is_read_by(
    quantizer: Quantizer, layer: WeightedLayer, readers: Mapping[fx.Graph, set[Quantizer | None]]
) -> bool:
    """Says whether the quantizer alone reads the weight; of a part of a parameter only one graph is looked at."""
    if layer.view is not None and layer.view.moves:
        return len(readers) == 1
    return set[Quantizer | None]().union(*readers.values()) == {quantizer}


def _readers_of_parameters(model: nn.Module) -> dict[int, dict[fx.Graph, set[Quantizer | None]]]:
    """Id of a parameter → the quantizers that read it, by graph; ``None`` among them for any other reader."""
    readers: dict[int, dict[fx.Graph, set[Quantizer | None]]] = {}
    for graph in graphs(model).values():
        for node in graph.graph.nodes:
            if node.op == "get_attr" and node.users:
                own = readers.setdefault(id(attribute(graph, str(node.target))), {}).setdefault(graph.graph, set())
                own |= {quantizer_called(user) for user in node.users}
    return readers


def _check_readers(flow: Flow, port: Port) -> None:
    for reader in flow.readers(flow.root(port.value)):
        if reader.value not in [own.value for own in flow.weight_ports(reader.user)]:
            raise NotALayer(f"is read by {op_name(reader.user)} too")


def _layer(
    graph: fx.GraphModule, flow: Flow, row: OpRow, port: Port, quantizer: Quantizer, shared: set[str], parts: int
) -> WeightedLayer:
    root = flow.root(port.value)
    (source,) = root.all_input_nodes
    view = parameter_view(graph, flow, source)
    if view is None:
        raise NotALayer("is computed from parameters, not one itself (after torch.nn.utils.parametrize."
                        "remove_parametrizations, remove_weight_norm or prune.remove it is)")
    if quantizer.site in shared:
        raise NotALayer("shares its encoding with other sites")
    weight = view.tensor
    if port.value is root and parts == 1 and _is_one_matrix(row, port, weight):
        return WeightedLayer(
            quantizer.site, _geometry(row, port, weight), weight, _bias(graph, row, port), quantizer,
            _activation(port.user), view=view,
        )
    use = stack_use(flow, row, port, parts=parts)
    bias, bias_moves = (_bias(graph, row, port), ()) if use.is_plain else stack_bias(graph, flow, use)
    return WeightedLayer(
        quantizer.site, Geometry.of_matrices(use.axes, weight.shape), weight, bias, quantizer,
        _activation(port.user) if use.is_plain else None, {port.user: use}, view, bias_moves,
    )


def _is_one_matrix(row: OpRow, port: Port, weight: Tensor) -> bool:
    """Says whether the op multiplies the weight as it is stored with the last axis, or the channels, of its input."""
    if row.product is Product.IN_OUT:
        return weight.ndim == 2 and row.data_arg is not None and port.arg == row.data_arg + 1
    return row.product is not None or row.kind not in ("grouped_matmul", "einsum")


def _activation(op: fx.Node) -> Callable[[Tensor], Tensor] | None:
    """The activation function that is the only reader of an op's output, through quantizers; ``None`` if none is."""
    node = op
    while len(node.users) == 1:
        (node,) = node.users
        if quantizer_called(node) is not None:
            continue
        row, function = row_of(node), node.target
        numbers = not any(isinstance(argument, fx.Node) for argument in (*node.args[1:], *node.kwargs.values()))
        if row is None or not row.activation or node.op != "call_function" or not numbers:
            return None
        assert callable(function)
        return lambda x: function(x, *node.args[1:], **node.kwargs)
    return None


def _geometry(row: OpRow, port: Port, weight: Tensor) -> Geometry:
    op, space = port.user, weight.ndim - 2
    if row.product is None:
        raise NotALayer(f"belongs to {row.kind}, whose output is not one matrix product")
    if row.product is Product.OUT_IN:
        return Geometry.linear()
    if row.product is Product.IN_OUT:
        return Geometry((), (), (), (), transposed=True)
    given = schema_arguments(op)
    kernel = tuple(weight.shape[2:])
    stride, dilation = (_each(given[name], space) for name in ("stride", "dilation"))
    transposed = row.product is Product.CONV_TRANSPOSE
    return Geometry(
        kernel, stride, _padding(given["padding"], kernel, dilation), dilation, int(given["groups"]),  # type: ignore[arg-type]
        transposed, _each(given["output_padding"], space) if transposed else (),
    )


def _padding(given: object, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    if given == "valid":
        return (0,) * len(kernel)
    if given == "same":
        around = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        if any(total % 2 for total in around):
            raise NotALayer("is padded on one side more than on the other")
        return tuple(total // 2 for total in around)
    return _each(given, len(kernel))


def _each(value: object, space: int) -> tuple[int, ...]:
    numbers = [int(number) for number in (value if isinstance(value, (list, tuple)) else [value])]  # type: ignore[arg-type]
    return tuple(numbers * space if len(numbers) == 1 else numbers)


def _bias(graph: fx.GraphModule, row: OpRow, port: Port) -> Tensor | None:
    """The bias as it is stored: behind its quantizer, if it has one."""
    given = port.user.args[row.bias] if row.bias is not None and row.bias < len(port.user.args) else None
    if isinstance(given, (list, tuple)):  # of a recurrent net: as many as weights, or none
        weights = port.user.args[port.arg]
        assert isinstance(weights, (list, tuple))
        given = given[port.item] if port.item is not None and len(given) == len(weights) else None
    while isinstance(given, fx.Node) and quantizer_called(given) is not None:
        (given,) = given.all_input_nodes
    return attribute(graph, str(given.target)) if isinstance(given, fx.Node) and given.op == "get_attr" else None
