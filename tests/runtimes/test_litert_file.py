import sys

import numpy as np
import pytest
import torch

from qtk.errors import ExportError
from qtk.export.litert.file import file_sites
from qtk.export.litert.flatbuffer import LiteRtModel
from qtk.report.verdict import Level
from qtk.runtimes.litert_file import LiteRtFile
from tests.export.litert.small_file import needs_converter, small


def test_without_the_runtime_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    with pytest.raises(ExportError, match=r"needs the package ai-edge-litert, .* missing; pip install 'qtk\[litert\]'"):
        LiteRtFile(tmp_path / "model.tflite", {})


@needs_converter
def test_rows_run_one_after_the_other_as_the_interpreter_runs_them():
    from ai_edge_litert.interpreter import Interpreter

    _, x, folder = small()
    rows = LiteRtFile(folder / "model.tflite", {}, threads=1).run({"input": x})["output"]
    interpreter = Interpreter(model_path=str(folder / "model.tflite"), num_threads=1)
    interpreter.allocate_tensors()
    for row in range(len(x)):
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x[row:row + 1].numpy())
        interpreter.invoke()
        np.testing.assert_array_equal(rows[row], interpreter.get_tensor(interpreter.get_output_details()[0]["index"]))


@needs_converter
def test_a_file_of_codes_takes_and_returns_floats_all_the_same(tmp_path):
    _, x, folder = small()
    model = LiteRtModel.load(folder / "model.tflite")
    model.take_codes()
    (tmp_path / "codes.tflite").write_bytes(model.to_bytes())
    of_codes, of_floats = (LiteRtFile(each, {}, threads=1) for each in (
        tmp_path / "codes.tflite", folder / "model.tflite"))
    assert torch.equal(of_codes.run({"input": x})["output"], of_floats.run({"input": x})["output"])
    assert of_codes.nodes() == of_floats.nodes()


@needs_converter
@pytest.mark.parametrize("runs_off", [False, True])
def test_the_verdict_is_green_until_weights_are_wrong_and_names_the_first_tensor(runs_off, tmp_path):
    sim, x, folder = small()
    model = LiteRtModel.load(folder / "model.tflite")
    if runs_off:
        (weight,) = (each.tensor for each in file_sites(model) if each.name == "0.weight")
        buffer = model._model.buffers[model._graph.tensors[weight.index].buffer]
        buffer.data = [255 - int(code) for code in buffer.data]  # of each code c its complement, -c - 1
    (tmp_path / "model.tflite").write_bytes(model.to_bytes())
    verdict = sim.verify_export(tmp_path, [x], runtime="litert", turns=0)
    first, reference = verdict.runs
    assert verdict.level is (Level.RED if runs_off else Level.GREEN)
    assert reference.runtime.endswith("reference kernels")
    assert {site.name for site in reference.sites} == {"input:input", "1:out", "3:out"}
    if runs_off:
        assert reference.first_departure.name == "1:out"
        assert any("first tensor off by more than one step is 1:out" in each.cause for each in verdict.findings)
    else:
        assert first.total.max_steps <= 1
        assert (first.nodes.integers(), first.nodes.floats) == ("1 CONV_2D, 1 FULLY_CONNECTED", ())
