"""ONNX's LSTM and GRU over padded sequences with their lengths: ``sequence_lens``, which torch's exporter omits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops.core import aten_gru, aten_lstm
from torch import Tensor

_REST = "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional"
torch.library.define(
    "qtk::padded_lstm", f"(Tensor x, Tensor lengths, Tensor[] hx, {_REST}) -> (Tensor, Tensor, Tensor)"
)
torch.library.define("qtk::padded_gru", f"(Tensor x, Tensor lengths, Tensor hx, {_REST}) -> (Tensor, Tensor)")

PADDED_KERNELS = {"lstm": torch.ops.qtk.padded_lstm.default, "gru": torch.ops.qtk.padded_gru.default}
"""Kind of a recurrent net → the op that computes it of sequences [T, N, I] and their lengths [N]; it is only traced."""


@torch.library.register_fake("qtk::padded_lstm")  # type: ignore[untyped-decorator]
def _lstm_shapes(
    x: Tensor, lengths: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *settings: object
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, cell = hx
    return _output(x, hidden, settings), torch.empty_like(hidden), torch.empty_like(cell)


@torch.library.register_fake("qtk::padded_gru")  # type: ignore[untyped-decorator]
def _gru_shapes(
    x: Tensor, lengths: Tensor, hx: Tensor, params: Sequence[Tensor], *settings: object
) -> tuple[Tensor, Tensor]:
    return _output(x, hx, settings), torch.empty_like(hx)


def _output(x: Tensor, hidden: Tensor, settings: Sequence[object]) -> Tensor:
    *_, bidirectional = settings
    return x.new_empty(x.shape[0], x.shape[1], hidden.shape[-1] * (2 if bidirectional else 1))


def _with_lengths(translation: Callable[..., tuple[ir.Value, ...]]) -> Callable[..., object]:
    """Torch's translation of the net, with the lengths at each operator of a layer."""

    def translate(x: ir.Value, lengths: ir.Value, hx: object, params: object, *settings: object) -> object:
        int32 = op.Cast(lengths, to=ir.DataType.INT32)
        results = translation(x, hx, params, *settings, False)
        value: ir.Value | None = results[0]
        while value is not None and value is not x and (node := value.producer()) is not None:
            if node.op_type in ("LSTM", "GRU"):
                node.replace_input_with(LENGTHS, int32)
            value = node.inputs[0]
        return results

    return translate


LENGTHS = 4
"""Input ``sequence_lens`` of the operators."""

TRANSLATIONS: Mapping[Callable[..., object], Callable[..., object]] = {
    PADDED_KERNELS["lstm"]: _with_lengths(aten_lstm), PADDED_KERNELS["gru"]: _with_lengths(aten_gru),
}
"""Operator → its translation."""
