import warnings

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.export.litert.flatbuffer import LiteRtModel
from qtk.runtimes.kinds import RUNTIMES
from qtk.runtimes.litert_file import LiteRtFile
from qtk.workflow import export_programs
from qtk.workflow.export_programs import pt2e_name
from tests.export.litert.small_file import needs_converter, small


def test_names_of_programs():
    assert (pt2e_name(""), pt2e_name("a.b")) == ("model.pt2", "a.b.pt2")


def test_codes_of_inputs_are_asked_of_litert_alone(tmp_path):
    sim = qtk.QuantSim(nn.Linear(4, 2).eval(), torch.randn(8, 4))
    sim.compute_encodings([torch.randn(8, 4)], progress=False)
    with pytest.raises(ExportError, match="io_codes=True has no effect on the formats pt2e; add 'litert'"):
        sim.export(tmp_path / "out", formats="pt2e", io_codes=True)


@needs_converter
def test_a_file_of_codes_is_written_on_request(tmp_path):
    sim, x, _ = small()
    sim.export(tmp_path / "out", formats="litert", io_codes=True)
    model = LiteRtModel.load(tmp_path / "out" / "model.tflite")
    tensors = model.tensors
    assert {tensors[index].kind for index in (*model.inputs.values(), *model.outputs.values())} == {"INT8"}
    verdict = sim.verify_export(tmp_path / "out", [x], runtime="litert", turns=0)
    assert verdict.runs[0].total.max_steps <= 1


@needs_converter
@pytest.mark.parametrize("is_off", [False, True])
def test_a_file_that_departs_is_warned_of(is_off, monkeypatch):
    sim, x, folder = small()
    if is_off:
        run = LiteRtFile.run
        monkeypatch.setattr(LiteRtFile, "run", lambda self, inputs, **asked: {
            name: -value for name, value in run(self, inputs, **asked).items()})
    from qtk.calls.calls import Call
    from qtk.graph.graphs import roots

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export_programs._warn_of_departures(
            RUNTIMES["litert"], lambda path, reasons, threads: LiteRtFile(path, reasons, threads=threads),
            folder / "model.tflite", roots(sim.model)[""], Call((x,), {}, None))
    said = [str(each.message) for each in caught if "model.tflite was written, but LiteRT" in str(each.message)]
    assert len(said) == is_off
    assert all("runtime='litert') finds the first tensor" in each for each in said)
