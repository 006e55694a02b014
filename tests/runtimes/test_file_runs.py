import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from qtk.analysis.simulated_values import SimulatedValue
from qtk.errors import ExportError
from qtk.export.onnx.qdq import export
from qtk.export.onnx.qdq_nodes import SITES
from qtk.report.verdict import EXACT, OFF, ON
from qtk.runtimes import file_runs
from qtk.runtimes.file_runs import FileRuns, merged_runs
from tests.export.onnx.simulated import simulate

INPUTS = torch.randn(5, 8)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    torch.manual_seed(0)
    sim = simulate(nn.Linear(8, 4), INPUTS)
    path = tmp_path_factory.mktemp("runs") / "model.onnx"
    export(sim, INPUTS, path)
    return sim, path


@pytest.fixture
def runs(file):
    runs = FileRuns(file[1], {})
    yield runs
    runs.close()


@pytest.mark.medium
def test_the_reference_is_the_simulation(file, runs):
    outputs, sites = runs.reference({"input": INPUTS})
    with torch.no_grad():
        expected = file[0](INPUTS)
    assert torch.allclose(outputs[0], expected, atol=1e-6)
    assert set(sites) == {("input:input", 0), ("linear:out", 0)}


def test_differences_add_up_over_batches(runs):
    for batch in (INPUTS, -INPUTS):
        (output,), sites = runs.reference({"input": batch})
        runs.compare({"input": batch}, [SimulatedValue(output + 1.0, torch.tensor(0.5))], {
            key: SimulatedValue(value, torch.tensor(1.0)) for key, value in sites.items()
        })
    off = runs.runs()[0]
    assert off.way == OFF
    assert (off.total.elements, off.differing) == (40, 1.0)
    assert abs(off.max_difference_scales - 2.0) < 1e-5
    assert off.top1 == 1.0
    assert [site.differing for site in off.sites] == [0.0, 0.0]


def test_a_runtime_that_refuses_is_told_and_the_others_go_on(file, monkeypatch):
    original = file_runs.session_with

    def refusing(path, optimizations, **options):
        if optimizations is file_runs.Optimizations.EXACT:
            raise RuntimeError("several operators share a weight\nand more")
        return original(path, optimizations, **options)

    monkeypatch.setattr(file_runs, "session_with", refusing)
    runs = FileRuns(file[1], {})
    (output,), _ = runs.reference({"input": INPUTS})
    runs.compare({"input": INPUTS}, [SimulatedValue(output)], {})
    by_way = {run.way: run for run in runs.runs()}
    assert by_way[EXACT].refusal == "several operators share a weight"
    assert by_way[EXACT].total is None
    assert by_way[ON].total is not None
    runs.close()


@pytest.mark.medium
def test_one_row_is_timed(runs, monkeypatch):
    rows = []
    original = file_runs._run_session
    monkeypatch.setattr(
        file_runs, "_run_session", lambda session, names, feed: rows.append(len(feed["input"])) or
        original(session, names, feed),
    )
    timed = FileRuns(runs.file, {})
    timed.measure({"input": INPUTS}, runs.file, turns=2, progress=False)
    assert set(rows) == {1}
    on = timed.runs()[1]
    assert on.latency_ms > 0
    assert on.float_latency_ms > 0
    timed.close()


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "rows"), [(3, 3), (12, 12)])
def test_latency_is_of_the_rows_and_threads_that_are_asked_for(file, batch_size, rows, monkeypatch):
    timed, threads = FileRuns(file[1], {}, threads=1), []
    original = file_runs.op_times
    monkeypatch.setattr(file_runs, "op_times", lambda path, feed, **options: threads.append(
        (len(feed["input"]), options["threads"])) or original(path, feed, **options))
    timed.measure({"input": INPUTS}, file[1], turns=2, progress=False, batch_size=batch_size)
    assert threads == [(rows, 1)] * 2
    assert str(timed.timing).startswith(f"batch {rows}, 1 thread")
    on = timed.runs()[1]
    assert on.slowest == () or on.slowest[0].float_ms > 0
    timed.close()


@pytest.mark.medium
def test_a_file_that_runs_on_its_rows_alone_is_timed_on_them_and_says_so_quietly(tmp_path, capfd):
    """The two inputs name one batch, and one row of the second does not fit the first's three parts."""
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "shape"], ["grouped"]), helper.make_node("Relu", ["grouped"], ["y"])],
        "rows", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array([3, -1, 4], np.int64), "shape")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    helper.set_model_props(model, {SITES: '{"specs": [], "nodes": {}}'})
    onnx.save(model, tmp_path / "model.onnx")
    timed = FileRuns(tmp_path / "model.onnx", {})
    capfd.readouterr()
    timed.measure({"x": torch.randn(6, 4)}, None, turns=1, progress=False)
    assert capfd.readouterr() == ("", "")
    assert str(timed.timing).startswith("batch 6 (the file does not run on 1 row)")
    assert timed.runs()[1].latency_ms > 0
    timed.close()


def write_sum(path, *, rows):
    """A file of x [batch, 4] + state [1, batch, 4] that runs on ``rows`` rows, or on any number."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "state"], ["sum"]), helper.make_node("Reshape", ["sum", "shape"], ["y"])], "sum",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4]),
         helper.make_tensor_value_info("state", TensorProto.FLOAT, [1, "batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array([1, rows, 4], np.int64), "shape")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    helper.set_model_props(model, {SITES: '{"specs": [], "nodes": {}}'})
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(("rows", "said"), [(-1, "batch 2,"), (6, "batch 6 (the file does not run on 2 rows)")])
def test_rows_are_taken_along_the_batch_axis_of_each_input_if_both_files_run_on_them(tmp_path, rows, said):
    timed = FileRuns(write_sum(tmp_path / "model.onnx", rows=-1), {})
    in_float = write_sum(tmp_path / "float.onnx", rows=rows)
    timed.measure({"x": torch.randn(6, 4), "state": torch.randn(1, 6, 4)}, in_float, turns=1, progress=False,
                  batch_size=2)
    assert str(timed.timing).startswith(said)
    assert timed.runs()[1].float_latency_ms > 0
    timed.close()


def test_inputs_of_another_model_are_refused(runs):
    with pytest.raises(ExportError, match="the file takes input, the model x"):
        runs.compare({"x": INPUTS}, [SimulatedValue(INPUTS)], {})
    with pytest.raises(ExportError, match="the file returns 1 tensors, the model 2"):
        runs.compare({"input": INPUTS}, [SimulatedValue(INPUTS)] * 2, {})


def test_files_are_summed_up(file):
    both = [FileRuns(file[1], {}) for _ in range(2)]
    for runs, offset in zip(both, (0.0, 1.0), strict=True):
        (output,), _ = runs.reference({"input": INPUTS})
        runs.compare({"input": INPUTS}, [SimulatedValue(output + offset)], {})
    total = merged_runs(both)[0]
    assert (total.total.elements, total.differing, total.top1) == (40, 0.5, None)
    for runs in both:
        runs.close()
