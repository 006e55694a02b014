"""Dynamic quantization in ONNX: the formulas of ``qtk.numerics.dynamic`` as float32 nodes, bit for bit.

uint8 per tensor becomes DynamicQuantizeLinear, which runtimes support; ONNX does not define its result for NaN,
infinities, ranges that overflow float32, and ranges below 255 times the smallest normal float32. Per token, each row is
a block as long as the last axis; ONNX Runtime (seen in 1.31) does not run these on an empty batch. Where codes are
narrower than their ONNX type, the value is first clipped to the dequantized lowest and highest code.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from qtk.core.granularity import PerToken
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError
from qtk.export.onnx.node_writer import NodeWriter
from qtk.export.onnx.storage_types import limits
from qtk.numerics.effective import SMALLEST_SCALE
from qtk.numerics.ranges import LARGEST_REAL

FLOAT = ir.DataType.FLOAT


def dynamic_qdq(
    writer: NodeWriter, site: str, value: ir.Value, spec: QuantSpec, kind: ir.DataType
) -> tuple[ir.Node, ir.Node]:
    """Inserts the nodes of a site with dynamic quantization, per tensor or per token.

    Returns: the node that reads the value, and the DequantizeLinear.

    Raises: ExportError if the site is per token and the last axis has no fixed length.
    """
    return _Dynamic(writer, site, value, spec, kind).qdq()


class _Dynamic:
    def __init__(self, writer: NodeWriter, site: str, value: ir.Value, spec: QuantSpec, kind: ir.DataType) -> None:
        assert value.shape is not None
        self.writer, self.site, self.spec, self.kind = writer, site, spec, kind
        self.real = writer.cast(value, FLOAT)
        self.by_row = isinstance(spec.granularity, PerToken) and len(value.shape) > 1
        self.rank, self.length = len(value.shape), value.shape[-1] if value.shape else 1
        self.shape = ir.Shape([*value.shape[:-1], 1]) if self.by_row else ir.Shape([])

    def qdq(self) -> tuple[ir.Node, ir.Node]:
        if not isinstance(self.length, int) and self.by_row:
            raise ExportError(
                f"{self.site}: ONNX quantizes per token only along a last axis of fixed length, this one is "
                f"{self.length}; quantize this site per tensor, or fix the length in prepare_model"
            )
        if self._is_the_onnx_operator():
            return self._by_operator()
        low = self._op("Min", self._extreme("ReduceMin"), self._number(0.0))
        high = self._op("Max", self._extreme("ReduceMax"), self._number(0.0))
        scale = self._scale(low, high)
        zero = None if self.spec.symmetric else self._zero_point(low, scale)
        stored_zero = self._no_offset() if zero is None else self._cast(zero)
        attributes = {"axis": self.rank - 1, "block_size": int(self.length)} if self.by_row else {}
        type_of_codes = {"output_dtype": int(self.kind)} if stored_zero is None else {}  # opset 21, as blocks are
        codes = self.writer.node(
            "QuantizeLinear", [self._clipped(scale, zero), scale, stored_zero], self.kind, attributes | type_of_codes
        )
        inputs = [codes.outputs[0], scale, stored_zero]
        return codes, self.writer.node("DequantizeLinear", inputs, FLOAT, attributes)

    def _is_the_onnx_operator(self) -> bool:
        codes = self.spec.qmin, self.spec.qmax
        return not self.by_row and not self.spec.symmetric and codes == (0, 255) and self.kind == ir.DataType.UINT8

    def _by_operator(self) -> tuple[ir.Node, ir.Node]:
        node = self.writer.node("DynamicQuantizeLinear", [self.real], self.kind)
        node.resize_outputs(3)
        for output, name, dtype in ((node.outputs[1], "scale", FLOAT), (node.outputs[2], "zero_point", self.kind)):
            output.name, output.dtype, output.shape = f"{node.name}.{name}", dtype, ir.Shape([])
        return node, self.writer.node("DequantizeLinear", list(node.outputs), FLOAT)

    def _extreme(self, op: str) -> ir.Value:
        axes = [self.writer.initializer("qtk.last_axis", np.array([-1]))] if self.by_row else []
        attributes = {"keepdims": int(self.by_row)}
        return self.writer.node(op, [self.real, *axes], FLOAT, attributes, shape=self.shape).outputs[0]

    def _scale(self, low: ir.Value, high: ir.Value) -> ir.Value:
        qmin, qmax = self.spec.qmin, self.spec.qmax
        if self.spec.symmetric:
            farthest = max(qmax, -qmin)
            parts = [self._op("Div", end, self._number(code)) for end, code in ((high, qmax), (low, qmin))]
            scale = self._op("Max", *parts)
        else:
            farthest = qmax - qmin
            scale = self._op("Div", self._op("Sub", high, low), self._number(farthest))
        largest = LARGEST_REAL / farthest
        clipped = self._op("Clip", scale, self._number(SMALLEST_SCALE), self._number(largest))
        zero = self.writer.node("Equal", [scale, self._number(0.0)], ir.DataType.BOOL, shape=self.shape).outputs[0]
        return self._op("Where", zero, self._number(1.0), clipped)

    def _zero_point(self, low: ir.Value, scale: ir.Value) -> ir.Value:
        steps = self._op("Round", self._op("Sub", self._number(self.spec.qmin), self._op("Div", low, scale)))
        return self._op("Clip", steps, self._number(self.spec.qmin), self._number(self.spec.qmax))

    def _no_offset(self) -> ir.Value | None:
        """A zero point 0, which sets the type of the codes; ``None`` per token, where it would be computed per row."""
        if self.by_row:
            return None
        return self.writer.initializer(f"qtk.zero.{self.kind.name.lower()}", np.zeros((), self.kind.numpy()))

    def _cast(self, zero: ir.Value) -> ir.Value:
        return self.writer.node("Cast", [zero], self.kind, {"to": int(self.kind)}, shape=self.shape).outputs[0]

    def _clipped(self, scale: ir.Value, zero: ir.Value | None) -> ir.Value:
        real = self.real
        bounds = zip(("Max", "Min"), (self.spec.qmin, self.spec.qmax), limits(self.kind), strict=True)
        for op, code, limit in bounds:
            if code != limit:
                steps = self._number(code)
                if zero is not None:
                    steps = self._op("Sub", steps, zero)
                real = self.writer.node(op, [real, self._op("Mul", steps, scale)], FLOAT).outputs[0]
        return real

    def _op(self, op: str, *inputs: ir.Value) -> ir.Value:
        """Inserts a node on values that have the shape of the scale."""
        return self.writer.node(op, inputs, FLOAT, shape=self.shape).outputs[0]

    def _number(self, number: float) -> ir.Value:
        assert math.isfinite(number)
        value = np.array(number, dtype=np.float32)
        return self.writer.initializer(f"qtk.{value.item()!r}", value)
