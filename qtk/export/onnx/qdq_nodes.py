"""Replaces markers by QuantizeLinear and DequantizeLinear, and constant floats by stored integers.

The cases:

1. A constant becomes its codes, an initializer named after the site, and DequantizeLinear.
2. Any other value is named after the site and goes through QuantizeLinear and DequantizeLinear.
3. Codes narrower than their ONNX type: the value is first clipped to the dequantized lowest and highest code.
   QuantizeLinear gives exactly these codes at the bounds: (code · scale) / scale rounds back to code.
4. A value that is not float32 is cast to float32 before and back after, as in the simulation.
5. Dynamic quantization: ``dynamic_qdq`` adds nodes that compute scale and zero point.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable

import onnx_ir as ir
import torch
from onnx_ir.passes.common import OutputFixPass, RemoveUnusedNodesPass
from torch import Tensor

from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.free_name import free_name
from qtk.core.granularity import Granularity, PerBlock, PerChannel, PerTensor, PerToken, PerTokenBlock
from qtk.errors import ExportError
from qtk.export.onnx.dynamic_qdq import dynamic_qdq
from qtk.export.onnx.marked_graph import DOMAIN, MARKER, MarkedGraph
from qtk.export.onnx.names import ValueNames, fix_lengths, name_inputs_and_outputs, name_lengths
from qtk.export.onnx.node_writer import LENGTHS, NodeWriter, array_of, insert_before, value_of
from qtk.export.onnx.onnxruntime.hard_sigmoids import CONSTANT
from qtk.export.onnx.onnxruntime.linear_nodes import PERMUTATION
from qtk.export.onnx.storage_types import limits, storage_type
from qtk.export.simulated_sites import SimulatedSite
from qtk.numerics import affine, minifloat

SITE, SPEC = "site", "spec"
"""Metadata keys of a DequantizeLinear until the file is complete: the name of its site, and its spec as JSON."""

SITES = "qtk.sites"
"""Metadata key of a file: JSON with the list ``specs``, and ``nodes``: name of a DequantizeLinear → name of its site
(``null``: the same), index of its spec and, where the stored codes are transposed, the site's axes in their order, and,
where codes are longer, pairs of an axis and the site's length; and, if there are any, ``constants``: the names of
constants of formulas, which are no sites."""


def replace_markers(marked: MarkedGraph, sites: Iterable[SimulatedSite], *, opset: int) -> ValueNames:
    """Replaces the markers of ``sites`` in ``marked.model``, and names its inputs, outputs and sites. In place.

    Returns: the names of its values.

    Raises: ExportError naming a site whose blocks ONNX cannot express, or that is missing from the graph.
    """
    graph = marked.model.graph
    fix_lengths(graph)
    markers: dict[str, list[ir.Node]] = defaultdict(list)
    for node in graph.all_nodes():
        if node.domain == DOMAIN and node.op_type == MARKER:
            markers[node.attributes["site"].as_string()].append(node)
    entries = {}
    for site in sites:
        if site.name not in markers:
            raise ExportError(f"{site.name} is quantized in the model, but the exported graph does not use its value")
        for step, marker in enumerate(markers[site.name]):  # more than one where the model's own loop is unrolled
            name = f"{site.name}@{step}" if step else site.name
            entries[name] = _replace(marker, graph, site, name, opset)
    marked.model.opset_imports.pop(DOMAIN, None)
    RemoveUnusedNodesPass()(marked.model)
    OutputFixPass()(marked.model)
    names = ValueNames(graph)
    name_inputs_and_outputs(graph, names, marked.input_names, marked.output_names)
    name_lengths(graph, marked.equal_axes)
    _name_sites(names, entries)
    return names


def qparam_name(site: str, kind: str) -> str:
    """Name of the initializer with the scale or zero point of a site."""
    return f"{site}.{kind}"


def list_sites(model: ir.Model) -> None:
    """Moves site and spec of every DequantizeLinear, also in the body of a Scan, to the metadata of the file."""
    specs: dict[str, int] = {}
    nodes: dict[str, tuple[object, ...]] = {}
    constants: list[str] = []
    for node in model.graph.all_nodes():
        if node.metadata_props.pop(CONSTANT, None) is not None:
            node.name = free_name(node.name or CONSTANT, nodes, "@")
            constants.append(node.name)
        if SITE not in node.metadata_props:
            continue
        site, spec = node.metadata_props.pop(SITE), node.metadata_props.pop(SPEC)
        node.name = free_name(node.name or site, nodes, "@")
        layout = [json.loads(node.metadata_props.pop(key, "[]")) for key in (PERMUTATION, LENGTHS)]
        while layout and not layout[-1]:
            layout.pop()
        nodes[node.name] = (None if node.name == site else site, specs.setdefault(spec, len(specs)), *layout)
    listed = {"specs": [json.loads(spec) for spec in specs], "nodes": nodes}
    if constants:
        listed["constants"] = constants
    model.metadata_props[SITES] = json.dumps(listed, separators=(",", ":"))


def _name_sites(names: ValueNames, entries: dict[str, ir.Node]) -> None:
    """Names the value that each node of ``entries`` reads after its site.

    A value that keeps another name (an input, an output, a float parameter, another site) is read through Identity.
    """
    named: set[ir.Value] = set()
    for site, node in entries.items():
        value = node.inputs[0]
        if value is None:
            continue  # removed, because no ONNX node reads it
        codes = node.op_type == "DequantizeLinear"
        keeps_name = value.is_initializer() or value.is_graph_input() or value.is_graph_output() or value in named
        if keeps_name and not codes:
            identity = ir.node("Identity", [value], outputs=[value_of(value.dtype, value.shape)])
            insert_before(node, identity)
            value = identity.outputs[0]
            node.replace_input_with(0, value)
        names.give(value, site)
        named.add(value)


def _replace(marker: ir.Node, graph: ir.Graph, site: SimulatedSite, name: str, opset: int) -> ir.Node:
    """Puts QuantizeLinear and DequantizeLinear in place of a marker.

    Returns: the node that reads the value of the site, or its stored codes.
    """
    value = marker.inputs[0]
    assert value is not None
    if value.shape is None or value.dtype is None:
        raise ExportError(f"{site.name}: the exported graph does not tell the shape of this value")
    writer = NodeWriter(graph, marker, name, value.shape)
    kind = storage_type(site.spec.dtype, opset=opset, stored=site.constant is not None)
    if site.encoding is None:
        entry, result = dynamic_qdq(writer, site.name, value, site.spec, kind)
    else:
        entry, result = _Calibrated(writer, site.name, site.encoding, value.shape, kind).qdq(value, site.constant)
    result.name = name
    result.metadata_props.update({SITE: site.name, SPEC: json.dumps(site.spec.to_json())})
    same_kind = writer.cast(result.outputs[0], value.dtype)
    marker.outputs[0].replace_all_uses_with(same_kind, replace_graph_outputs=True)
    assert marker.graph is not None
    marker.graph.remove(marker, safe=True)
    return entry


class _Calibrated:
    """Writes the nodes of a site with an encoding (cases 1 to 4)."""

    def __init__(
        self, writer: NodeWriter, site: str, encoding: Encoding, shape: ir.Shape, kind: ir.DataType
    ) -> None:
        self.writer, self.site, self.encoding, self.shape, self.kind = writer, site, encoding, shape, kind
        self.block_axis = self._block_axis(encoding.spec.granularity)

    def qdq(self, value: ir.Value, constant: Tensor | None) -> tuple[ir.Node, ir.Node]:
        """Writes the nodes.

        Args:
            value: what is quantized.
            constant: its numbers, if they are known.

        Returns: the node that reads the value, or its stored codes, and the DequantizeLinear.
        """
        attributes = self._axis_and_block_size()
        scale_and_zero_point = self._scale_and_zero_point()
        if constant is not None:
            without_offset = self.encoding.zero_point is None and not self.encoding.spec.middle_code
            if without_offset and ("block_size" in attributes or self.kind == ir.DataType.INT32):
                del scale_and_zero_point[1:]
            stored = self.writer.node(
                "DequantizeLinear", [self._codes(constant), *scale_and_zero_point], ir.DataType.FLOAT, attributes
            )
            return stored, stored
        real = self._clipped(self.writer.cast(value, ir.DataType.FLOAT), attributes)
        codes = self.writer.node("QuantizeLinear", [real, *scale_and_zero_point], self.kind, attributes)
        return codes, self.writer.node(
            "DequantizeLinear", [codes.outputs[0], *scale_and_zero_point], ir.DataType.FLOAT, attributes
        )

    def _axis_and_block_size(self) -> dict[str, int]:
        match self.encoding.spec.granularity:
            case PerTensor():
                return {}
            case PerChannel() as channel:
                return {"axis": channel.axis_of(len(self.shape))}
            case PerToken() | PerTokenBlock():
                raise AssertionError("scales of tokens are found at run time")
            case PerBlock():
                return {"axis": self.block_axis, "block_size": self._block_sizes()[self.block_axis]}

    def _block_sizes(self) -> list[int]:
        """Indices that share a scale, along each axis."""
        counts = self.encoding.scale.shape
        pairs = zip(self.shape, counts, strict=True)
        return [1 if length == count else int(length) // count for length, count in pairs]

    def _block_axis(self, granularity: Granularity) -> int:
        """The axis that has blocks in the file, with the longest blocks; along all other axes scales are repeated."""
        if not isinstance(granularity, PerBlock):
            return 0
        counts = self.encoding.scale.shape
        if not all(isinstance(length, int) for axis, length in enumerate(self.shape) if length != counts[axis]):
            shape = ", ".join(str(length) for length in self.shape)
            raise ExportError(
                f"{self.site}: ONNX holds blocks along axes of fixed length; blocks {granularity.sizes} of a tensor "
                f"({shape}) are not such; use sizes of 1 along the free axes, or per_channel"
            )
        sizes = self._block_sizes()
        return max(reversed(range(len(sizes))), key=sizes.__getitem__)

    def _for_file(self, numbers: Tensor) -> Tensor:
        """Scales or zero points with one entry for every index along all axes but that cut into blocks."""
        if isinstance(self.encoding.spec.granularity, PerBlock):
            for axis, size in enumerate(self._block_sizes()):
                numbers = numbers if axis == self.block_axis else numbers.repeat_interleave(size, axis)
        return numbers

    def _scale_and_zero_point(self) -> list[ir.Value]:
        """Initializers of scale and zero point; the zero point sets the type of the codes of QuantizeLinear."""
        scale, zero = self.encoding.scale, self.encoding.zero_point
        if zero is None:
            zero = torch.full_like(scale, self.encoding.spec.middle_code, dtype=torch.int32)
        if isinstance(self.encoding.spec.granularity, PerTensor):
            scale, zero = scale.reshape(()), zero.reshape(())
        scale, zero = self._for_file(scale), self._for_file(zero)
        return [
            self.writer.initializer(qparam_name(self.site, "scale"), array_of(scale)),
            self.writer.initializer(qparam_name(self.site, "zero_point"), array_of(zero).astype(self.kind.numpy())),
        ]

    def _codes(self, constant: Tensor) -> ir.Value:
        spec, encoding = self.encoding.spec, self.encoding
        sizes = spec.granularity.block_size(constant.ndim)
        if isinstance(spec.dtype, FloatDtype):
            codes = minifloat.quantize(constant, encoding.scale, sizes, spec.dtype)
        else:
            codes = affine.quantize(
                constant, encoding.scale, encoding.zero_point, sizes, int(spec.qmin), int(spec.qmax)
            ) + spec.middle_code
        return self.writer.initializer(f"{self.site}.codes", array_of(codes).astype(self.kind.numpy()))

    def _clipped(self, value: ir.Value, attributes: dict[str, int]) -> ir.Value:
        """Case 3: the value clipped by Clip, or by Max and Min if each channel or block has its own bounds."""
        spec, encoding = self.encoding.spec, self.encoding
        lowest, highest = limits(self.kind)
        low = None if spec.qmin + spec.middle_code == lowest else self._bound("minimum", encoding.minimum, attributes)
        high = None if spec.qmax + spec.middle_code == highest else self._bound("maximum", encoding.maximum, attributes)
        if low is None and high is None:
            return value
        if isinstance(spec.granularity, PerTensor):
            return self.writer.node("Clip", [value, low, high], ir.DataType.FLOAT).outputs[0]
        for op, bound in (("Max", low), ("Min", high)):
            if bound is not None:
                value = self.writer.node(op, [value, bound], ir.DataType.FLOAT).outputs[0]
        return value

    def _bound(self, name: str, bound: Tensor, attributes: dict[str, int]) -> ir.Value:
        """The bound in a shape that broadcasts against the value."""
        match self.encoding.spec.granularity:
            case PerTensor():
                bound = bound.reshape(())
            case PerChannel():
                bound = bound.reshape([-1] + [1] * (len(self.shape) - 1 - attributes["axis"]))
            case PerBlock():
                bound = self._for_file(bound).repeat_interleave(attributes["block_size"], attributes["axis"])
        return self.writer.initializer(f"{self.site}.{name}", array_of(bound))
