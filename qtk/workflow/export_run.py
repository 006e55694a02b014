"""Runs an exported ONNX file once, on the inputs that it was exported with, and says what departs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, fx

from qtk.capture.calls import Call
from qtk.errors import ExportError, first_line
from qtk.export.file_signature import file_inputs, file_signature
from qtk.export.onnx.session import Optimizations, create_session, other_float_remedy
from qtk.export.onnx.site_outputs import site_outputs
from qtk.graph.insert import quantizer_called
from qtk.report.difference import Difference
from qtk.report.findings import HIGH_SQNR_DB, departs, is_close
from qtk.workflow.difference_sums import DifferenceSums
from qtk.workflow.op_runs import op_differences
from qtk.workflow.simulated_values import Reference, SimulatedValues, step_of
from qtk.workflow.tolerance import tensor_outputs, tolerance_db

VERIFY = "sim.verify_export(directory, data) finds the first tensor that differs"


def departures(file: Path, graph: fx.GraphModule, call: Call) -> list[str]:
    """What ONNX Runtime computes otherwise than the simulation, with its optimizations off and on, a line each.

    What float rounding explains, or is little beside the quantization error, does not count (``tolerance_db``), nor,
    with the optimizations off, what a model amplifies though each op computes what was simulated.

    Args:
        file: the file.
        graph: the simulating graph that it was exported from.
        call: a call of it, with all tensors of the inputs.
    """
    inputs = {name: value.detach().cpu() for name, value in file_inputs(graph, call).items()}
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
        if far and not (not optimized and _ops_are_right(file, graph, call, inputs)):
            lines.append(f"{switched}: " + "; ".join(_text(each) for each in far) + f"; {VERIFY}")
            break
    return lines


def _ops_are_right(file: Path, graph: fx.GraphModule, call: Call, inputs: dict[str, Tensor]) -> bool:
    """Whether each op of the file, given the simulation's values, computes what was simulated, optimizations off."""
    sites = site_outputs(file, codes=False)
    simulated = SimulatedValues(graph, {site.site: site.step for site in sites})
    try:
        outputs = [Reference(value) for value in tensor_outputs(graph, call)]
        values = simulated.take()
    finally:
        simulated.close()
    try:
        ops = op_differences(file, sites, inputs, outputs, values, optimizations=Optimizations.OFF)
    except ExportError:
        return False
    return bool(ops) and not any(map(departs, ops))


def _differences(
    graph: fx.GraphModule, session: object, expected: list[Tensor], results: list[Tensor]
) -> Iterator[Difference]:
    quantizers = [quantizer_called(node) for node in file_signature(graph).outputs.values()]
    names = [output.name for output in session.get_outputs()]  # type: ignore[attr-defined]
    for index, (name, ours, theirs) in enumerate(zip(names, expected, results, strict=True)):
        quantizer = quantizers[index] if len(quantizers) == len(expected) else None
        sums = DifferenceSums(name)
        if ours.shape != theirs.shape:
            sums.add(Reference(torch.ones(1)), torch.full((1,), torch.nan))
        else:
            sums.add(Reference(ours, step_of(quantizer, ours)), theirs)
        yield sums.difference()


def _text(difference: Difference) -> str:
    return f"output {difference.name} is {difference.sqnr_db:.1f} dB from the simulation"
