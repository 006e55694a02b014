"""The sites in an exported file: for each its encoding and, if it is constant, its value."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import Tensor

from qtk.core.encoding import Encoding
from qtk.core.granularity import WHOLE, PerBlock, PerTensor, Shape
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError, QtkError
from qtk.export.onnx.node_writer import stored_value
from qtk.export.onnx.onnxruntime.passes import restore_nodes
from qtk.export.onnx.qdq_nodes import SITES


@dataclass(frozen=True, slots=True, eq=False)
class FileSite:
    """A DequantizeLinear of an exported file, in the body of a Scan too; a model's own loop has one per iteration.

    Args:
        name: name of the site.
        spec: its spec.
        encoding: its encoding; ``None`` for dynamic quantization.
        node: the DequantizeLinear.
        axes: the axes of the site in the order of the stored codes, where these are transposed.
        lengths: pairs of an axis and the length of the site along it, where the codes are longer.
    """

    name: str
    spec: QuantSpec
    encoding: Encoding | None
    node: ir.Node
    axes: tuple[int, ...] = ()
    lengths: tuple[tuple[int, int], ...] = ()

    def constant(self) -> Tensor | None:
        """The dequantized stored codes, float32; ``None`` if the codes are computed at run time.

        ``(codes - zero_point) * scale``, as ONNX defines it, with the axis and block size in the node's attributes.
        """
        codes, scale, *zero_points = map(stored_value, self.node.inputs)
        if codes is None or codes.const_value is None:
            return None
        reals = _numbers(codes).float()
        axis, block_size = self._attribute("axis", 1), self._attribute("block_size", 0)
        for zero_point in zero_points:
            reals = reals - _aligned(_numbers(zero_point).float(), reals, axis, block_size)
        values = reals * _aligned(_numbers(scale), reals, axis, block_size)
        return narrowed(_restored(values, self.axes), self.lengths)

    def _attribute(self, name: str, default: int) -> int:
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.as_int()


def stored_sites(path: str | os.PathLike[str]) -> Iterator[FileSite]:
    """The sites in a file that qtk exported, in graph order.

    Raises: ExportError if the file is not ONNX, or holds a DequantizeLinear that qtk did not write.
    """
    try:
        model = ir.load(path)
    except Exception as error:
        raise ExportError(f"cannot read {path} as ONNX: {error}") from error
    try:
        record = json.loads(model.metadata_props.get(SITES, '{"specs": [], "nodes": {}}'))
        specs = [QuantSpec.from_json(spec) for spec in record["specs"]]
        constants = set(record.get("constants", ()))
        sites = {
            node: (site or node, specs[index], *_layout(*layout))
            for node, (site, index, *layout) in record["nodes"].items()
        }
    except (QtkError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ExportError(f"{path}: the metadata {SITES} is broken: {error}") from error
    restore_nodes(model)
    for node in model.graph.all_nodes():
        if node.op_type == "DequantizeLinear" and node.name not in constants:
            if node.name not in sites:
                raise ExportError(f"{path}: {node.name} was not written by qtk, or its metadata is lost")
            yield _stored_site(node, *sites[node.name], path)


def narrowed(value: Tensor, lengths: Iterable[tuple[int, int]]) -> Tensor:
    """The first elements of a value along some axes, of pairs of an axis and a length."""
    for axis, length in lengths:
        value = value.narrow(axis, 0, length)
    return value


def _layout(
    axes: Sequence[int] = (), lengths: Sequence[Sequence[int]] = ()
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Axes and lengths as in ``FileSite``, of an entry in the metadata."""
    return tuple(axes), tuple((axis, length) for axis, length in lengths)


def _stored_site(
    node: ir.Node, site: str, spec: QuantSpec, axes: tuple[int, ...], lengths: tuple[tuple[int, int], ...],
    path: str | os.PathLike[str],
) -> FileSite:
    try:
        return FileSite(site, spec, None if spec.dynamic else _encoding(node, spec, axes), node, axes, lengths)
    except (QtkError, ValueError) as error:
        raise ExportError(f"{path}: {site}: {error}") from error


def _encoding(node: ir.Node, spec: QuantSpec, axes: tuple[int, ...]) -> Encoding:
    restored = [_restored(_numbers(value), axes) for value in node.inputs[1:]]
    if isinstance(spec.granularity, PerBlock):
        axis = node.attributes["axis"].as_int()
        restored = [_once_a_block(each, spec.granularity.sizes, axes[axis] if axes else axis) for each in restored]
    scale, *zero_point = [each.reshape(1) if isinstance(spec.granularity, PerTensor) else each for each in restored]
    return Encoding(spec, scale.float(), None if spec.symmetric else zero_point[0].int())


def _once_a_block(numbers: Tensor, sizes: Shape, block_axis: int) -> Tensor:
    """One entry for each block, of entries that a file repeats along all axes but the axis cut into blocks."""
    for axis, size in enumerate(sizes):
        if axis != block_axis:
            step = max(numbers.shape[axis], 1) if size == WHOLE else size
            numbers = numbers.index_select(axis, torch.arange(0, numbers.shape[axis], step))
    return numbers


def _restored(stored: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Returns what is stored with its axes in another order, in the order of the site."""
    return stored.permute([axes.index(axis) for axis in range(len(axes))]).contiguous() if axes else stored


def _numbers(value: ir.Value | None) -> Tensor:
    value = stored_value(value)
    if value is None or value.const_value is None:
        raise ValueError("scale and zero point must be initializers")
    dtype = "int32" if value.const_value.dtype.is_integer() else "float32"
    return torch.from_numpy(numbers_in(value.const_value, dtype))


def numbers_in(tensor: ir.TensorProtocol, dtype: str) -> npt.NDArray[np.generic]:
    """A copy of a tensor of a file in another dtype; what was read of the file of external data is freed again."""
    array: npt.NDArray[np.generic] = tensor.numpy().astype(dtype)
    if isinstance(tensor, ir.ExternalTensor):
        tensor.release()
    return array


def _aligned(values: Tensor, reals: Tensor, axis: int, block_size: int) -> Tensor:
    """Scales or zero points in a shape that broadcasts against the values."""
    if values.ndim == 0:
        return values
    if block_size:
        return values.repeat_interleave(block_size, axis)
    return values.reshape([-1 if index == axis % reals.ndim else 1 for index in range(reals.ndim)])
