"""Runs an exported ONNX file once, on the inputs that it was exported with, and says what departs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, fx

from qtk.capture.calls import Call
from qtk.capture.inputs import input_leaves
from qtk.capture.signature import input_names, output_nodes
from qtk.errors import first_line
from qtk.export.onnx.session import create_session, other_float_remedy
from qtk.graph.insert import quantizer_called
from qtk.report.difference import Difference
from qtk.report.findings import HIGH_SQNR_DB, is_close
from qtk.workflow.difference_sums import DifferenceSums
from qtk.workflow.simulated_values import step_of
from qtk.workflow.tolerance import tensor_outputs, tolerance_db

VERIFY = "sim.verify_export(directory, data) finds the first tensor that differs"


def departures(file: Path, graph: fx.GraphModule, call: Call) -> list[str]:
    """What ONNX Runtime computes otherwise than the simulation, with its optimizations off and on, a line each.

    What float rounding explains, or is little beside the quantization error, does not count (``tolerance_db``).

    Args:
        file: the file.
        graph: the simulating graph that it was exported from.
        call: a call of it, with all tensors of the inputs.
    """
    leaves = zip(input_names(graph), input_leaves(graph.graph, call.args, call.kwargs), strict=True)
    inputs = {name: leaf.detach().cpu() for name, leaf in leaves if isinstance(leaf, Tensor)}
    expected, least_db = tensor_outputs(graph, call), HIGH_SQNR_DB
    lines: list[str] = []
    for optimized in (False, True):
        switched = f"ONNX Runtime, optimizations {'on' if optimized else 'off'}"
        try:
            session, _ = create_session(file, optimized=optimized)
            feed = {name: tensor.numpy() for name, tensor in inputs.items()}
            results = [torch.from_numpy(array) for array in session.run(None, feed)]
        except Exception as error:  # whatever the runtime says
            remedy = other_float_remedy(graph)
            lines.append(f"{switched}, does not run it: {first_line(error)}{'' if remedy is None else f'; {remedy}'}")
            break
        off = [each for each in _differences(graph, session, expected, results) if not is_close(each)]
        if off and least_db == HIGH_SQNR_DB:
            least_db = tolerance_db(graph, call, expected)
        far = [each for each in off if not is_close(each, least_db)]
        if far:
            lines.append(f"{switched}: " + "; ".join(_text(each) for each in far) + f"; {VERIFY}")
            break
    return lines


def _differences(
    graph: fx.GraphModule, session: object, expected: list[Tensor], results: list[Tensor]
) -> Iterator[Difference]:
    quantizers = [quantizer_called(node) for node in output_nodes(graph).values()]
    names = [output.name for output in session.get_outputs()]  # type: ignore[attr-defined]
    for index, (name, ours, theirs) in enumerate(zip(names, expected, results, strict=True)):
        quantizer = quantizers[index] if len(quantizers) == len(expected) else None
        sums = DifferenceSums(name)
        if ours.shape != theirs.shape:
            sums.add(torch.ones(1), torch.full((1,), torch.nan), None)
        else:
            sums.add(ours, theirs, step_of(quantizer, ours))
        yield sums.difference()


def _text(difference: Difference) -> str:
    return f"output {difference.name} is {difference.sqnr_db:.1f} dB from the simulation"
