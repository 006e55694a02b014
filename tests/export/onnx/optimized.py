"""What ONNX Runtime makes of a file: the nodes of its optimized graph."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx

from qtk.runtimes.session import create_session

FLOAT_PRODUCTS = {"MatMul", "FusedMatMul", "Gemm", "FusedGemm", "Conv", "FusedConv", "Einsum"}


def optimized(path: Path) -> onnx.ModelProto:
    with TemporaryDirectory() as folder:
        target = Path(folder) / "optimized.onnx"
        create_session(path, threads=1, optimized_file=target)
        return onnx.load(target)


def kinds(path: Path) -> Counter[str]:
    """Kind → number of nodes after optimization, those in the bodies of loops included."""
    return Counter(node.op_type for graph in _graphs(optimized(path).graph) for node in graph.node)


def float_weighted(path: Path) -> list[str]:
    """The names of the products of floats after optimization that read a weight, dequantized or not."""
    found = []
    constants: set[str] = set()
    for graph in _graphs(optimized(path).graph):
        constants |= {each.name for each in graph.initializer}
        for node in graph.node:
            if node.op_type in ("DequantizeLinear", "Transpose", "Cast") and node.input[0] in constants:
                constants.add(node.output[0])
            if node.op_type in FLOAT_PRODUCTS and constants & set(node.input[:2]):
                found.append(node.name)
    return found


def _graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    inside = [
        inner for node in graph.node for attribute in node.attribute
        if attribute.type == onnx.AttributeProto.GRAPH for inner in _graphs(attribute.g)
    ]
    return [graph, *inside]
