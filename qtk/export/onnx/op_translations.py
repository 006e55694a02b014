"""Translations to ONNX in place of torch's own, which compute something else at zeros, far from them, or at borders.

torch 2.14 maps ``atan2`` to −π instead of π on the negative real axis, which quantized values lie on; overflows in
``log_sigmoid`` below −88; gives a ``conv3d`` without bias one of two columns; and drops the divisor of an average pool.
Windows of a pool in ceil mode that end behind the input are written so that ONNX Runtime's integer kernel (1.32), which
divides by the whole kernel where padding counts, computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch
from onnxscript import opset18 as op

from qtk.errors import ExportError
from qtk.export.onnx.node_writer import insert_before

Translation = Callable[..., object]


def _atan2(y: ir.Value, x: ir.Value) -> object:
    """The angle of (x, y) in (−π, π], the sign of a zero counted as torch does."""
    ratio = op.Where(op.Equal(y, _like(0.0, y)), y, op.Div(y, x))  # of (0, 0) 0
    turn = op.Where(_is_negative(y), _like(-math.pi, y), _like(math.pi, y))
    return op.Where(_is_negative(x), op.Add(op.Atan(ratio), turn), op.Atan(ratio))


def _is_negative(value: ir.Value) -> object:
    """Of −0, too: its inverse is −∞."""
    zero = _like(0.0, value)
    return op.Less(op.Where(op.Equal(value, zero), op.Reciprocal(value), value), zero)


def _log_sigmoid(x: ir.Value) -> object:
    return op.Neg(op.Softplus(op.Neg(x)))


def _conv(
    x: ir.Value, weight: ir.Value, bias: ir.Value | None = None, stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,), groups: int = 1,
) -> object:
    """As ``aten.conv1d``, ``conv2d``, ``conv3d``; without bias, ONNX's has none either."""
    assert x.shape is not None
    assert weight.shape is not None
    axes, has_batch = len(weight.shape) - 2, len(x.shape) == len(weight.shape)
    strides, pads, dilations = (
        list(each) * (axes if len(each) == 1 else 1) for each in (stride, padding, dilation))
    result = op.Conv(
        x if has_batch else op.Unsqueeze(x, _ints(0)), weight, bias, strides=strides, pads=pads * 2,
        dilations=dilations, group=groups,
    )
    return result if has_batch else op.Squeeze(result, _ints(0))


def _avg_pool(
    x: ir.Value, kernel_size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> object:
    """As ``aten.avg_pool1d``, ``2d``, ``3d``. Raises: ExportError for a divisor with windows that end behind the input.

    Padding that counts is written out where a window may end behind it: all elements of the padded input count then.
    """
    assert x.shape is not None
    axes, rank = len(kernel_size), len(x.shape)
    steps, pads = list(stride) or list(kernel_size), list(padding) * (axes if len(padding) == 1 else 1)
    windows = [_Windows(*each) for each in zip(list(x.shape)[-axes:], kernel_size, steps, pads, strict=True)]
    is_cut = ceil_mode and any(axis.is_last_cut for axis in windows)
    counts_padding = (count_include_pad or divisor_override is not None) and any(pads)
    if is_cut and divisor_override is not None:
        raise ExportError(
            f"an average pool over {tuple(kernel_size)} with divisor_override={divisor_override} has windows that end "
            "behind the input (ceil_mode=True), and ONNX has no form of that; pad the input and leave ceil_mode out"
        )
    if is_cut and counts_padding and all(axis.may_be_written_out for axis in windows):
        before = [0] * (rank - axes) + pads
        x, pads, counts_padding = op.Pad(x, op.Constant(value_ints=before * 2), _like(0.0, x)), [0] * axes, False
    has_batch = rank == axes + 2
    pooled = op.AveragePool(
        x if has_batch else op.Unsqueeze(x, _ints(0)), kernel_shape=list(kernel_size), strides=steps, pads=pads * 2,
        ceil_mode=int(is_cut), count_include_pad=int(counts_padding),
    )
    result = pooled if has_batch else op.Squeeze(pooled, _ints(0))
    if divisor_override is None:
        return result
    return op.Mul(result, _like(math.prod(kernel_size) / divisor_override, x))


@dataclass(frozen=True, slots=True)
class _Windows:
    """The windows of a pool along one axis. Args: length: of the input, no integer if it is free."""

    length: object
    size: int
    step: int
    padding: int

    @property
    def is_last_cut(self) -> bool:
        """Says whether in ceil mode there may be a window that ends behind the padded input."""
        return not isinstance(self.length, int) or self._beyond(self.length) > self._whole(self.length)

    @property
    def may_be_written_out(self) -> bool:
        """Says whether the input with its padding written out has as many: torch has none that begin in padding."""
        if not isinstance(self.length, int):
            return False
        reach = self.length + 2 * self.padding - self.size
        return self._beyond(self.length) == -(-reach // self.step) + 1

    def _whole(self, length: int) -> int:
        return (length + 2 * self.padding - self.size) // self.step + 1

    def _beyond(self, length: int) -> int:
        count = -(-(length + 2 * self.padding - self.size) // self.step) + 1
        return count - 1 if (count - 1) * self.step >= length + self.padding else count


def widen_indices(graph: ir.Graph) -> None:
    """Casts int32 indices of ScatterND and GatherND to int64, the only type that ONNX takes. In place.

    torch translates ``istft`` to such a ScatterND.
    """
    for node in list(graph.all_nodes()):
        indices = node.inputs[1] if node.op_type in ("ScatterND", "GatherND") else None
        if indices is not None and indices.dtype is not ir.DataType.INT64:
            cast = ir.node("Cast", [indices], {"to": ir.DataType.INT64}, name=f"{node.name}.indices")
            cast.outputs[0].dtype, cast.outputs[0].shape = ir.DataType.INT64, indices.shape
            insert_before(node, cast)
            node.replace_input_with(1, cast.outputs[0])


def _like(number: float, value: object) -> object:
    return op.CastLike(op.Constant(value_float=number), value)


def _ints(number: int) -> object:
    return op.Constant(value_ints=[number])


TRANSLATIONS: Mapping[Callable[..., object], Translation] = {
    torch.ops.aten.atan2.default: _atan2,
    torch.ops.aten.log_sigmoid.default: _log_sigmoid,
    torch.ops.aten.conv1d.default: _conv,
    torch.ops.aten.conv2d.default: _conv,
    torch.ops.aten.conv3d.default: _conv,
    torch.ops.aten.avg_pool1d.default: _avg_pool,
    torch.ops.aten.avg_pool2d.default: _avg_pool,
    torch.ops.aten.avg_pool3d.default: _avg_pool,
}
"""Operator → its translation."""
