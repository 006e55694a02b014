"""What ONNX Runtime makes of a linear layer, by the way it is written, and how fast that runs.

The ways: MatMul and Add on three axes, or Gemm on two, the bias in float; Gemm with Q/DQ behind it; Gemm with an int32
bias in the scale of the products, as ONNX Runtime's own quantizer writes it. Two layers of 384 → 1536 → 384 over 197
tokens, a function between them and nothing behind the second. Times are medians of interleaved turns in one process.

    python benchmarks/models/bench_linear_forms.py
    python benchmarks/models/bench_linear_forms.py --threads 2 --turns 100
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from qtk.runtimes.session import create_session

TOKENS, NARROW, WIDE = 197, 384, 1536
FORMS = ("MatMul + Add", "Gemm", "Gemm, Q/DQ behind", "Gemm, int32 bias")
FUNCTIONS = {"nothing": None, "GELU": "Gelu", "tanh": "Tanh", "ReLU": "Relu"}
INPUT_SCALE = np.float32(0.02)


class Mlp:
    """Two linear layers in one of the forms, as an ONNX graph."""

    def __init__(self, form: str, function: str | None) -> None:
        self.form, self.rng = form, np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        value = self.linear(self.quantized("x", "input"), NARROW, WIDE, "up")
        if function is not None:
            value = self.node(function, [value], "function")
        rectified = function == "Relu"  # then real 0 is the lowest code, and ONNX Runtime drops the function
        value = self.linear(self.quantized(value, "middle", 0 if rectified else 120), WIDE, NARROW, "down")
        self.node("Identity", [value], "y")

    def model(self) -> bytes:
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", TOKENS, NARROW]) for name in "xy"]
        graph = helper.make_graph(self.nodes, "mlp", ends[:1], ends[1:], self.initializers)
        model: bytes = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9).SerializeToString()
        return model

    def node(self, op: str, inputs: list[str], output: str, **attributes: int) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def constant(self, array: np.ndarray, name: str) -> str:
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def reshaped(self, value: str, shape: list[int], name: str) -> str:
        return self.node("Reshape", [value, self.constant(np.array(shape), f"{name}.shape")], name)

    def quantized(self, value: str, name: str, zero: int = 120) -> str:
        qparams = [self.constant(INPUT_SCALE, f"{name}.scale"), self.constant(np.uint8(zero), f"{name}.zero")]
        codes = self.node("QuantizeLinear", [value, *qparams], f"{name}.codes")
        return self.node("DequantizeLinear", [codes, *qparams], f"{name}.real")

    def dequantized(self, codes: np.ndarray, scale: np.ndarray, name: str, axis: int) -> str:
        inputs = [self.constant(codes, name), self.constant(scale, f"{name}.scale"),
                  self.constant(np.zeros(scale.shape, codes.dtype), f"{name}.zero")]
        return self.node("DequantizeLinear", inputs, f"{name}.real", axis=axis)

    def linear(self, value: str, narrow: int, wide: int, name: str) -> str:
        codes = self.rng.integers(-64, 65, (wide, narrow)).astype(np.int8)
        scale = self.rng.uniform(0.001, 0.002, wide).astype(np.float32)
        bias = self.rng.standard_normal(wide).astype(np.float32)
        if self.form == "MatMul + Add":
            weight = self.dequantized(codes.T.copy(), scale, f"{name}.weight", 1)
            product = self.node("MatMul", [value, weight], f"{name}.product")
            return self.node("Add", [product, self.constant(bias, f"{name}.bias")], name)
        added = self.constant(bias, f"{name}.bias")
        if self.form == "Gemm, int32 bias":
            steps = scale * INPUT_SCALE
            added = self.dequantized(np.round(bias / steps).astype(np.int32), steps, f"{name}.codes_of_bias", 0)
        weight = self.dequantized(codes, scale, f"{name}.weight", 0)
        matrix = self.reshaped(value, [-1, narrow], f"{name}.matrix")
        result = self.node("Gemm", [matrix, weight, added], f"{name}.sums", transB=1)
        if self.form == "Gemm, Q/DQ behind":
            result = self.quantized(result, f"{name}.behind")
        return self.reshaped(result, [-1, TOKENS, wide], name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="few turns, to see that the script runs")
    arguments = parser.parse_args()
    turns = 3 if arguments.quick else arguments.turns
    table = Table(title=f"ONNX Runtime {onnxruntime.__version__}, {arguments.threads} threads", title_justify="left")
    for heading in ("between", "written as", "products in the optimized graph", "time, ms"):
        table.add_column(heading)
    x = np.random.default_rng(1).standard_normal((1, TOKENS, NARROW)).astype(np.float32)
    for label, function in FUNCTIONS.items():
        sessions, kinds = {}, {}
        with tempfile.TemporaryDirectory() as folder:
            for form in FORMS:
                file = Path(folder) / "optimized.onnx"
                sessions[form], _ = create_session(
                    Mlp(form, function).model(), threads=arguments.threads, optimized_file=file)
                kinds[form] = Counter(node.op_type for node in onnx.load(file).graph.node)
        times: dict[str, list[float]] = {form: [] for form in FORMS}
        for _ in range(turns + 1):
            for form, session in sessions.items():
                started = time.perf_counter()
                session.run(None, {"x": x})
                times[form].append((time.perf_counter() - started) * 1000)
        for form in FORMS:
            products = {kind: n for kind, n in kinds[form].items() if "Gemm" in kind or "MatMul" in kind}
            table.add_row(label, form, ", ".join(f"{n} {kind}" for kind, n in products.items()),
                          f"{statistics.median(times[form][1:]):.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
