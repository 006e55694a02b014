import json

import onnx
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import qtk
from qtk.cli.app import app
from qtk.config.files import shipped_names


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    folder, x = tmp_path_factory.mktemp("exported"), torch.randn(4, 8)
    sim = qtk.QuantSim(nn.Linear(8, 4).eval(), x, config="tensorrt")
    sim.compute_encodings([x], progress=False)
    sim.export(folder / "out", formats="onnx")
    return folder / "out"


def invoke(*arguments):
    return CliRunner().invoke(app, ["targets", *map(str, arguments)])


def test_the_list_has_every_target_with_its_rules():
    result = invoke()
    assert result.exit_code == 0, result.output
    for name in shipped_names("targets"):
        assert name in result.stdout
    assert "per_channel: weights of convolutions have a scale for each output channel" in result.stdout
    assert "not checked: residual sums" in result.stdout


@pytest.mark.medium
def test_a_file_that_keeps_the_rules_exits_with_0(exported):
    result = invoke("--check", exported / "model.onnx")
    assert result.exit_code == 0, result.output
    assert "tensorrt (TensorRT 11" in result.stdout
    assert "all kept" in result.stdout


def test_a_broken_rule_is_shown_with_its_source_and_exits_with_1(exported):
    result = invoke("--check", exported, "--target", "onnxruntime")
    assert result.exit_code == 1
    for part in ("saturation", "https://onnxruntime.ai", "reduced_range: true"):
        assert part in result.stdout
    record = invoke("--check", exported, "--target", "onnxruntime", "--json")
    assert record.exit_code == 1
    (check,) = json.loads(record.stdout)
    assert check["target"] == "onnxruntime"
    assert {each["rule"] for each in check["violations"]} == {"saturation"}
    assert (check["unchecked"], check["partly_checked"]) == ([], {})


def test_mistakes_are_one_clean_message(exported, tmp_path):
    result = invoke("--check", exported, "--target", "tensort")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "did you mean 'tensorrt'" in result.stderr
    assert "absent.onnx does not exist" in invoke("--check", tmp_path / "absent.onnx").stderr
    assert "go with --check" in invoke("--json").stderr
    model = onnx.load(exported / "model.onnx")
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "plain.onnx")
    assert "does not say which target it is for" in invoke("--check", tmp_path / "plain.onnx").stderr


def test_a_target_without_a_runtime_takes_all_formats():
    (row,) = (line for line in invoke().stdout.splitlines() if line.startswith(" default "))
    assert row.rstrip().endswith(" all")
