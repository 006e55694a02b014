"""The quantized layers of a simulated model as compressed-tensors sees them: a weight, and how its input is quantized.

Layers are found by what they do in the graph: products of an input with a parameter, whatever module holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx, nn

from qtk.core.encoding import Encoding
from qtk.core.granularity import PerTensor
from qtk.core.overlaps import joined
from qtk.core.spec import ScaleFormat
from qtk.errors import ExportError
from qtk.export.compressed_tensors.arguments import Unsuited, global_scale, input_arguments, weight_arguments
from qtk.export.compressed_tensors.caches import caches_of
from qtk.graph.float_root import float_root
from qtk.graph.flow import Flow, is_result
from qtk.graph.graphs import graphs
from qtk.graph.insert import QUANTIZERS, quantizer_called, quantizer_nodes
from qtk.graph.parameter_readers import memory_of, parameter_readers
from qtk.graph.sites import SITE, Port, label
from qtk.moments.stack_use import NotALayer, StackUse, stack_use
from qtk.numerics.matrix_axes import MatrixAxes
from qtk.numerics.scale_formats import tensor_scale_of
from qtk.operators.lookup import op_name
from qtk.operators.targets import attribute
from qtk.quantizers.quantizer import Mode, Quantizer

LISTED = 10
"""Sites that an error lists."""

KINDS = ("linear", "matmul", "addmm", "grouped_matmul")
"""Products that layers of checkpoints compute."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLayer:
    """The quantized weight of a layer, or of a stack of layers.

    Args:
        name: of the parameter, ``blocks.0.up.weight``.
        weight: the parameter.
        axes: which of its axes count matrices, outputs and inputs.
        encoding: its encoding.
        inputs: the quantizer of what it is multiplied with; ``None``: that is float.
        reads: the float values that are, one for each use.
    """

    name: str
    weight: Tensor
    axes: MatrixAxes
    encoding: Encoding
    inputs: Quantizer | None
    reads: tuple[fx.Node, ...]

    @property
    def path(self) -> str:
        """Of its module."""
        return self.name.rpartition(".")[0]

    @property
    def is_transposed(self) -> bool:
        """Says whether the weight has its inputs before its outputs."""
        return self.axes.outputs[0] > self.axes.columns[0]

    @property
    def is_dequantized(self) -> bool:
        """Says whether transformers reads the layer alone when it dequantizes it as it loads (seen in 5.24).

        Such a layer is no ``nn.Linear``; or has packed zero points, for which the modules of transformers have no room;
        or has four-bit floats in a model that is not bfloat16: the library makes bfloat16 weights of these, which
        transformers casts then alone. Quantized inputs are lost so, in all layers of the model.
        """
        spec = self.encoding.spec
        is_packed = not spec.symmetric and not isinstance(spec.granularity, PerTensor)
        is_cast = spec.scale_format is not None and self.weight.dtype != torch.bfloat16
        return (self.is_transposed and not self.axes.stack) or (self.inputs is None and (is_packed or is_cast))


@dataclass(slots=True)
class Layers:
    """The layers of a model: the quantized ones by name, and the names of the weights of products in float.

    ``caches``: see ``caches_of``.
    """

    quantized: dict[str, QuantizedLayer] = field(default_factory=dict)
    in_float: dict[str, None] = field(default_factory=dict)
    caches: dict[str, list[Quantizer]] = field(default_factory=dict)

    def siblings(self) -> list[list[QuantizedLayer]]:
        """The layers by what they read; servers fuse layers that read the same value."""
        groups: dict[fx.Node, list[QuantizedLayer]] = {}
        for layer in self.quantized.values():
            for value in layer.reads:
                groups.setdefault(value, []).append(layer)
        return list(groups.values())

    def global_scales(self) -> dict[str, Tensor]:
        """Name of each NVFP4 weight → the divisor of its scales: one for siblings, if one suits all of their scales."""
        found: dict[str, Tensor] = {}
        for names in joined([layer.name for layer in members] for members in self.siblings()):
            members = [self.quantized[name] for name in names]
            scales = {layer.name: layer.encoding.scale.cpu().flatten() for layer in members
                      if layer.encoding.spec.scale_format is ScaleFormat.E4M3}
            common = tensor_scale_of(torch.cat(list(scales.values()))) if scales else None
            found |= {name: global_scale(scale) if common is None else (1.0 / common).reshape(1)
                      for name, scale in scales.items()}
        return found


def layers_of(model: nn.Module) -> Layers:
    """Raises: ExportError naming the sites that the format cannot hold, or if no layer is quantized."""
    found, findings = Layers(caches=caches_of(model)), dict[str, str]()
    cached = {quantizer for quantizers in found.caches.values() for quantizer in quantizers}
    names = {memory_of(tensor): name for name, tensor in reversed(model.state_dict().items())
             if tensor.numel() and QUANTIZERS not in name.split(".")}
    readers = parameter_readers(model)
    for graph in graphs(model).values():
        flow = Flow(graph.graph)
        for node, quantizer in quantizer_nodes(graph).items():
            if quantizer.mode is not Mode.SIMULATE or not node.users or quantizer in cached:
                continue
            site = str(label(node, SITE))
            try:
                if not quantizer.static:
                    _check_activation(flow, node)
                    continue
                layer = _layer(graph, flow, node, quantizer, names)
                if readers[memory_of(layer.weight)] != {quantizer}:
                    raise Unsuited("is read in another format, or in float, too")
                known = found.quantized.setdefault(layer.name, layer)
                if known.inputs is not layer.inputs and not have_same_encoding(known.inputs, layer.inputs):
                    raise Unsuited("multiplies inputs that are quantized in several ways")
                found.quantized[layer.name] = replace(
                    known, reads=tuple(dict.fromkeys((*known.reads, *layer.reads))))
            except (NotALayer, Unsuited) as reason:
                findings[site] = str(reason)
        found.in_float |= dict.fromkeys(_in_float(graph, flow, names))
    if findings:
        listed = [f"{site} {reason}" for site, reason in list(findings.items())[:LISTED]]
        listed += [f"and {len(findings) - LISTED} more"] if len(findings) > LISTED else []
        raise ExportError("\n  ".join([
            "compressed-tensors files hold weights of linear layers, and how the inputs of these are quantized; the "
            "targets vllm_w4a16, vllm_w8a8, vllm_fp8 and vllm_nvfp4 quantize such alone. Leave these in float (rules "
            "with weight: float or output: float), or export formats=('onnx',):", *listed]))
    if not found.quantized and not cached:
        raise ExportError("no weight of a linear layer is quantized; export formats=('onnx',)")
    return found


def _layer(
    graph: nn.Module, flow: Flow, node: fx.Node, quantizer: Quantizer, names: dict[tuple[object, ...], str]
) -> QuantizedLayer:
    """The layer of a quantized weight. Raises: NotALayer or Unsuited with the reason if the format has no such."""
    source = node.all_input_nodes[0]
    weight = attribute(graph, str(source.target)) if source.op == "get_attr" else None
    encoding = quantizer.encoding
    if not isinstance(weight, Tensor) or encoding is None:
        raise Unsuited("is computed from parameters")
    uses = [_use(flow, port) for port in flow.readers(node)]
    axes = {use.axes for use in uses}
    if len(axes) > 1:
        raise Unsuited("is multiplied in several ways")
    (layout,) = axes
    activations = list(dict.fromkeys(_quantizer_of(flow, use.data) for use in uses))
    if any(not have_same_encoding(activations[0], each) for each in activations):
        raise Unsuited("multiplies inputs that are quantized in several ways")
    name = names.get(memory_of(weight), "")
    if not layout.stack and name.rpartition(".")[2] != "weight":
        raise Unsuited("is not the weight of a module")
    layer = QuantizedLayer(name, weight.detach(), layout, encoding, activations[0],
                           tuple(dict.fromkeys(float_root(flow, use.data) for use in uses)))
    weight_arguments(encoding, layout, tuple(weight.shape))
    if encoding.spec.scale_format is ScaleFormat.E4M3:
        global_scale(encoding.scale)
    if activations[0] is not None:
        spec = activations[0].spec
        input_arguments(spec)
        if spec.scale_format not in (None, encoding.spec.scale_format):
            raise Unsuited(f"multiplies inputs of {spec}; servers have them with weights of the same format")
    return layer


def _use(flow: Flow, port: Port) -> StackUse:
    """Says how the op at ``port`` multiplies a weight. Raises: NotALayer or Unsuited."""
    row = flow.row(port.user)
    weights = [own.index for own in flow.weight_ports(port.user)] if row is not None else []
    if row is None or row.kind not in KINDS or port.index not in weights:
        raise Unsuited(f"is read by {op_name(port.user) if row is None else row.kind}")
    use = stack_use(flow, row, port)
    if use.is_left or use.terms is not None or len(use.axes.stack) > 1:
        raise Unsuited(f"is a factor of {row.kind} other than inputs times a matrix for each expert")
    return use


def _quantizer_of(flow: Flow, value: fx.Node) -> Quantizer | None:
    """The quantizer that made a value, which may have been moved since; ``None`` if it is float."""
    quantizer = quantizer_called(flow.root(value))
    return quantizer if quantizer is not None and quantizer.mode is Mode.SIMULATE else None


def have_same_encoding(first: Quantizer | None, second: Quantizer | None) -> bool:
    """Says whether two inputs are quantized with the same numbers."""
    if first is None or second is None or first.spec != second.spec:
        return first is second
    one, other = first.encoding, second.encoding
    return one is other or (one is not None and other is not None and one.equals(other))


def _check_activation(flow: Flow, node: fx.Node) -> None:
    """Raises: Unsuited if anything but the product of a layer with a quantized weight reads a quantized value."""
    for port in flow.readers(node):
        row = flow.row(port.user)
        if is_result(port) or row is None:
            raise Unsuited(f"is an activation that {'the model returns' if is_result(port) else op_name(port.user)}"
                           f"{'' if is_result(port) else ' reads'}")
        weights = flow.weight_ports(port.user)
        if row.kind not in KINDS or not weights or quantizer_called(flow.root(weights[0].value)) is None:
            raise Unsuited(f"is an activation that {row.kind} reads, which has no quantized weight")


def _in_float(graph: nn.Module, flow: Flow, names: dict[tuple[object, ...], str]) -> Iterator[str]:
    """The names of the parameters that linear layers multiply with in float."""
    assert isinstance(graph, fx.GraphModule)
    for node in graph.graph.nodes:
        row = flow.row(node)
        for port in flow.weight_ports(node) if row is not None and row.kind in KINDS else ():
            root = flow.root(port.value)
            value = attribute(graph, str(root.target)) if root.op == "get_attr" else None
            if isinstance(value, Tensor) and memory_of(value) in names:
                yield names[memory_of(value)]
