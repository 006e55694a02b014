import pytest
import torch
from torch import nn

import qtk
from qtk.config.files import shipped_names
from qtk.errors import ExportError
from qtk.runtimes.kinds import RUNTIMES, runtime_of
from qtk.workflow.export import EXPORTERS


@pytest.mark.parametrize("name", list(RUNTIMES))
def test_a_runtime_runs_what_an_exporter_writes_for_targets_that_are_there(name):
    kind = RUNTIMES[name]
    assert kind.name == name
    assert kind.format in EXPORTERS
    assert set(kind.targets) <= set(shipped_names("targets"))
    assert kind.file_name("a.b") == f"a.b{kind.suffix}"


@pytest.mark.parametrize("name", list(RUNTIMES))
def test_a_missing_runtime_names_its_extra(name, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(ExportError, match=rf"{RUNTIMES[name].title} needs the package .*qtk\[{RUNTIMES[name].extra}\]"):
        RUNTIMES[name].require()
    sim = qtk.QuantSim(nn.Linear(4, 2).eval(), torch.randn(8, 4))
    with pytest.raises(ExportError, match=rf"qtk\[{RUNTIMES[name].extra}\]"):
        sim.verify_export(tmp_path, [torch.randn(8, 4)], runtime=name)


def test_extras_of_runtimes_are_those_of_the_package():
    from importlib.metadata import metadata

    extras = {*metadata("qtk").get_all("Provides-Extra"), "litert", "coreai"}
    assert {kind.extra for kind in RUNTIMES.values()} <= extras


def test_a_target_without_a_runtime_of_its_own_is_timed_in_onnx_runtime():
    named = {target: kind.name for kind in RUNTIMES.values() for target in kind.targets}
    assert {target: runtime_of(target).name for target in named} == named
    assert {runtime_of(target).name for target in (None, "tensorrt", "qnn_htp")} == {"onnxruntime"}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RUNTIMES))
def test_what_is_timed_runs_a_file_on_inputs_by_name_or_in_order(name, tmp_path):
    kind = RUNTIMES[name]
    if kind.missing is not None:
        pytest.skip(f"{kind.missing} is not installed")
    x = torch.randn(2, 4)
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), x, config=kind.targets[0])
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=(kind.format,))
    file = tmp_path / "out" / kind.file_name("")
    for given in ("input", "other"):
        kind.load(file)({given: x})()
    with pytest.raises(ExportError, match=r"the file takes input, the model input, other"):
        kind.load(file)({"input": x, "other": x})


def test_outputs_are_what_is_timed_returns(tmp_path):
    pytest.importorskip("onnxruntime")
    x = torch.randn(2, 4)
    sim = qtk.QuantSim(nn.Linear(4, 2).eval(), x, config="onnxruntime")
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",))
    (got,) = RUNTIMES["onnxruntime"].load(tmp_path / "out" / "model.onnx", threads=1)({"input": x})()
    torch.testing.assert_close(torch.from_numpy(got), sim.model(x))
