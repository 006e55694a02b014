"""Runs an exported ONNX file once, on the inputs that it was exported with, and says what departs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, fx

from qtk.analysis.simulated_values import SimulatedValue, SimulatedValues
from qtk.calls.calls import Call
from qtk.errors import ExportError, first_line
from qtk.export.file_signature import file_inputs, file_signature, tensor_outputs
from qtk.export.simulated_sites import step_of
from qtk.graph.graphs import STATES
from qtk.graph.insert import quantizer_called
from qtk.report.difference import Difference, far_outputs
from qtk.report.findings import AMPLIFIED_DB, departs, is_changed
from qtk.runtimes.difference_sums import DifferenceSums
from qtk.runtimes.op_runs import op_differences
from qtk.runtimes.session import Optimizations, create_session, other_float_remedy, session_with
from qtk.runtimes.site_outputs import site_outputs
from qtk.runtimes.state_values import StateCodes
from qtk.runtimes.tied_picks import lowest_index_first
from qtk.runtimes.tolerance import tolerances_db

VERIFY = "sim.verify_export(directory, data) finds the first tensor that differs"


def departures(file: Path, graph: fx.GraphModule, call: Call) -> list[str]:
    """Returns what ONNX Runtime computes otherwise than the simulation, with its optimizations off and on, a line each.

    The simulation picks the lowest index of equal scores, as ONNX Runtime does.

    What float rounding explains, or is little beside the quantization error, does not count (``tolerances_db``). Nor
    does what a model amplifies though each op computes what was simulated: with the optimizations on, where it is
    amplified without them too.

    Args:
        file: the file.
        graph: the simulating graph that it was exported from.
        call: a call of it, with all tensors of the inputs.
    """
    with lowest_index_first(graph):
        return _departures(file, graph, call)


def _departures(file: Path, graph: fx.GraphModule, call: Call) -> list[str]:
    inputs = {name: value.detach().cpu() for name, value in file_inputs(graph, call).items()}
    expected, least_db = tensor_outputs(graph, call), tuple[float, ...]()
    codes = StateCodes(file) if STATES in graph.meta else None
    lines: list[str] = []
    amplified: list[Difference] = []
    for optimizations in (Optimizations.OFF, Optimizations.ON):
        optimized = optimizations is Optimizations.ON
        switched = f"ONNX Runtime, optimizations {optimizations.value}"
        try:
            session, _ = create_session(file, optimized=optimized)
            given = inputs if codes is None else codes.stored(inputs)
            feed = {name: tensor.numpy() for name, tensor in given.items()}
            returned = zip(session.get_outputs(), session.run(None, feed), strict=True)
            values = {output.name: torch.from_numpy(array) for output, array in returned}
            results = [value if codes is None else codes.reals(name, value) for name, value in values.items()]
        except Exception as error:  # whatever the runtime says
            remedy = other_float_remedy(graph)
            lines.append(f"{switched}, does not run it: {first_line(error)}{'' if remedy is None else f'; {remedy}'}")
            break
        differences = list(_differences(graph, session, expected, results))
        if far_outputs(differences) and not least_db:
            least_db = tolerances_db(graph, call, expected)
        far = far_outputs(differences, least_db)
        may_amplify = not optimized or _are_near(differences, amplified)
        if far and not (may_amplify and _ops_are_right(file, graph, call, inputs, optimizations)):
            lines.append(f"{switched}: " + "; ".join(_text(each) for each in far) + f"; {VERIFY}")
            break
        amplified = differences if far else []
    return lines


def _are_near(optimized: list[Difference], amplified: list[Difference]) -> bool:
    """Says whether outputs are about as far from the simulation as without optimizations (the model amplifies)."""
    return bool(amplified) and all(
        on.sqnr_db >= off.sqnr_db - AMPLIFIED_DB for on, off in zip(optimized, amplified, strict=True))


def _ops_are_right(
    file: Path, graph: fx.GraphModule, call: Call, inputs: dict[str, Tensor], optimizations: Optimizations
) -> bool:
    """Says whether each op of the file, given the simulation's values, computes what was simulated."""
    optimized = optimizations is Optimizations.ON
    sites = site_outputs(file, codes=optimized)
    simulated = SimulatedValues(graph, {site.site: site.step for site in sites})
    try:
        outputs = [SimulatedValue(value) for value in tensor_outputs(graph, call)]
        values = simulated.take()
    finally:
        simulated.close()
    with tempfile.TemporaryDirectory(prefix="qtk-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / "optimized.onnx" if optimized else None
        try:
            if copy is not None:
                session_with(file, optimizations, optimized_file=copy)
            ops = op_differences(file, sites, inputs, outputs, values, optimizations=optimizations, optimized=copy)
        except ExportError:
            return False
    return bool(ops) and not any(map(is_changed if optimized else departs, ops))


def _differences(
    graph: fx.GraphModule, session: object, expected: list[Tensor], results: list[Tensor]
) -> Iterator[Difference]:
    quantizers = [quantizer_called(node) for node in file_signature(graph).outputs.values()]
    names = [output.name for output in session.get_outputs()]  # type: ignore[attr-defined]
    for index, (name, ours, theirs) in enumerate(zip(names, expected, results, strict=True)):
        quantizer = quantizers[index] if len(quantizers) == len(expected) else None
        sums = DifferenceSums(name)
        if ours.shape != theirs.shape:
            sums.add(SimulatedValue(torch.ones(1)), torch.full((1,), torch.nan))
        else:
            sums.add(SimulatedValue(ours, step_of(quantizer, ours)), theirs)
        yield sums.difference()


def _text(difference: Difference) -> str:
    return f"output {difference.name} is {difference.sqnr_db:.1f} dB from the simulation"
