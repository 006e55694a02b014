import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import qtk
from qtk.aimet import encodings_aimet
from qtk.errors import ExportError
from qtk.export import encodings_json
from qtk.workflow.export import export
from qtk.workflow.verify_export import LatencyRequest
from qtk.workflow.verify_files import verify_files
from tests.workflow.test_export import EXAMPLE, encodings_of, names, simulated


@pytest.fixture(scope="module")
def sim():
    return simulated()


def test_excluded_modules_are_the_excluded_layers_of_aimet(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    prepared = qtk.prepare_model(model.eval(), x, modules_to_exclude=["1"])
    sim = qtk.QuantSim(prepared, x, config={"version": 1, "exclude": ["2"]})
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats="encodings_aimet_1.0.0")
    data = json.loads((tmp_path / "out" / "encodings_aimet_1.0.0.json").read_text())
    assert data["excluded_layers"] == ["1", "2"]


def test_a_schema_that_cannot_hold_the_model_is_left_out_and_said(tmp_path):
    floats = simulated(config={"version": 1, "defaults": {"weight": {"dtype": "fp8_e4m3", "symmetric": True}}},
                       activation_bits=None)
    with pytest.warns(UserWarning, match=r"skipped encodings_aimet_1\.0\.0\.json: 0\.weight: .* holds no fp8_e4m3"):
        export(floats, EXAMPLE, tmp_path / "out", formats="encodings")
    assert names(tmp_path / "out") == ["encodings.json", "encodings_aimet_2.0.0.json"]
    back = encodings_json.read(tmp_path / "out" / "encodings.json")
    assert back["0.weight"].equals(encodings_of(floats)["0.weight"])
    with pytest.raises(ExportError, match="holds no fp8_e4m3"):
        export(floats, EXAMPLE, tmp_path / "one", formats="encodings_aimet_1.0.0")


@pytest.mark.medium
def test_converters_of_aimet_get_the_float_model_beside_each_schema_once(sim, tmp_path):
    export(sim, EXAMPLE, tmp_path / "out", formats=("onnx", "aimet_0.6.1", "aimet_2.0.0"))
    assert names(tmp_path / "out") == [
        "encodings_aimet_0.6.1.json", "encodings_aimet_2.0.0.json", "float", "model.onnx"
    ]
    assert names(tmp_path / "out" / "float") == ["model.onnx"]
    latency = LatencyRequest(0, float_export=tmp_path / "out" / "float")
    verdict = verify_files(tmp_path / "out", [EXAMPLE], latency=latency)
    assert len(verdict) == 1


def doubled(encodings, site="0.weight"):
    """The encodings with the scale of one site doubled."""
    if isinstance(encodings, list):
        return [replace(each, encoding=replace(each.encoding, scale=each.encoding.scale * 2))
                if each.name == site else each for each in encodings]
    return {each: replace(encoding, scale=encoding.scale * 2) if each == site else encoding
            for each, encoding in encodings.items()}


@pytest.mark.parametrize(
    ("module", "writer", "file"),
    [
        (encodings_json, "export", "encodings.json"),
        (encodings_aimet, "1.0.0", "encodings_aimet_1.0.0.json"),
        (encodings_aimet, "2.0.0", "encodings_aimet_2.0.0.json"),
    ],
)
def test_a_wrong_scale_in_a_file_of_encodings_is_found(module, writer, file, sim, tmp_path, monkeypatch):
    table, key = (module.WRITERS, writer) if module is encodings_aimet else (vars(module), writer)
    write = table[key]
    monkeypatch.setitem(table, key, lambda encodings, path, **rest: write(doubled(encodings), path, **rest))
    with pytest.raises(ExportError, match=rf"{file} read back differs .*: 0\.weight: scale\[0\] is .* nothing was"):
        export(sim, EXAMPLE, tmp_path / "out", formats="encodings")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lost", [True, False])
def test_a_site_that_only_one_side_has_is_found(lost, sim, tmp_path, monkeypatch):
    def write(encodings, path, **rest):
        extra = dict(list(encodings.items())[1:]) if lost else {**encodings, "other": next(iter(encodings.values()))}
        original(extra, path, **rest)

    original = encodings_json.export
    monkeypatch.setattr(encodings_json, "export", write)
    found = "is missing in the file" if lost else "other is not quantized in the simulation"
    with pytest.raises(ExportError, match=rf"encodings\.json read back .*{found}"):
        export(sim, EXAMPLE, tmp_path / "out", formats="encodings_json")


def test_a_lost_site_of_dynamic_quantization_is_found(tmp_path, monkeypatch):
    dynamic, original = simulated(config="dynamic"), encodings_json.export
    monkeypatch.setattr(encodings_json, "export", lambda encodings, path, **_: original(encodings, path))
    with pytest.raises(ExportError, match=r"encodings\.json read back .* dynamic quantization"):
        export(dynamic, EXAMPLE, tmp_path / "out", formats="encodings_json")


def test_a_file_that_cannot_be_read_back_is_an_error(sim, tmp_path, monkeypatch):
    monkeypatch.setattr(encodings_json, "export", lambda encodings, path, **_: path.write_text("{"))
    with pytest.raises(ExportError, match=r"encodings\.json read back .* is not JSON"):
        export(sim, EXAMPLE, tmp_path / "out", formats="encodings_json")
