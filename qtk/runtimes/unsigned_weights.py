"""Writes a copy of a file in which weights whose sums can saturate are uint8: the same numbers, exact on every CPU.

A code c with zero point z is c + 128 with zero point z + 128 (see ``saturation``). ONNX Runtime's own setting,
``session.EXACT_MODE``, does so with some operators, but not with QLinearMatMul nor in the bodies of loops (seen in
1.32), and refuses weights that many operators share (``separate_weights``).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qtk.errors import ExportError
from qtk.export.onnx.qdq_nodes import SITES
from qtk.runtimes.model_copy import write_copy
from qtk.runtimes.saturation import saturating_codes

READERS = {"DequantizeLinear": (0, 1, 2), "QLinearMatMul": (3, 4, 5)}
"""Operators that read the codes of weights → the places of codes, scale and zero point."""

MIDDLE = 128
"""Code of the middle of uint8."""


def with_unsigned_weights(file: Path, folder: Path) -> Path:
    """``file`` if none of its weights saturates, otherwise the copy, in ``folder``.

    Raises: ExportError if qtk did not write ``file``.
    """
    names = saturating_codes(file)
    model = ir.load(file)
    if SITES not in model.metadata_props:
        raise ExportError(f"{file} was not written by qtk: it has no metadata {SITES}")
    if not names:
        return file
    for graph in (model.graph, *model.graph.subgraphs()):
        for codes in [value for name, value in graph.initializers.items() if name in names]:
            if codes.dtype == ir.DataType.INT8 and _is_read_as_codes(codes):
                _make_unsigned(codes, graph)
    return write_copy(model, file, folder)


def _is_read_as_codes(codes: ir.Value) -> bool:
    return all(node.op_type in READERS and READERS[node.op_type][0] == place for node, place in codes.uses())


def _make_unsigned(codes: ir.Value, graph: ir.Graph) -> None:
    for number, (node, _) in enumerate(codes.uses()):
        _, scale_at, zero_point_at = READERS[node.op_type]
        if len(node.inputs) <= zero_point_at:
            node.resize_inputs(zero_point_at + 1)
        scale, zero_point = node.inputs[scale_at], node.inputs[zero_point_at]
        if zero_point is not None:
            numbers = _unsigned(zero_point)
        else:
            assert scale is not None
            assert scale.const_value is not None
            numbers = np.full(tuple(scale.const_value.shape), MIDDLE, np.uint8)
        name = f"{codes.name}/unsigned_zero_point_{number}"
        middle = ir.Value(name=name, const_value=ir.tensor(numbers, name=name))
        graph.register_initializer(middle)
        node.replace_input_with(zero_point_at, middle)
    codes.const_value = ir.tensor(_unsigned(codes), name=codes.name)
    codes.dtype = ir.DataType.UINT8


def _unsigned(value: ir.Value) -> npt.NDArray[np.uint8]:
    assert value.const_value is not None
    codes: npt.NDArray[np.int16] = value.const_value.numpy().astype(np.int16)
    return (codes + MIDDLE).astype(np.uint8)
