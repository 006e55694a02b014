"""What ``qtk inspect`` shows."""

import io

import pytest
import torch
from rich.console import Console

from qtk.cli.inspect import inspect, parse_shape
from qtk.errors import ConfigError, QtkError


def shown(*args, **kwargs):
    file = io.StringIO()
    inspect(*args, Console(file=file, width=200), **kwargs)
    return file.getvalue()


def test_report_plan_and_what_stays_in_float(project):
    text = shown(f"{project.module}:net", input_shapes=["1,6"], weight_bits=4)
    assert "captured by export" in text
    assert "first.weight" in text
    assert "int4" in text
    assert "per_channel(axis=0) symmetric" in text
    assert "inside supergroup linear → relu" in text
    assert "quantizers:" in text


def test_memory_is_forecast_for_each_offload(project):
    text = shown(f"{project.module}:net", input_shapes=["1,6"], memory=True, methods=["gptq"], num_batches=3)
    assert [line.partition(": peak")[0] for line in text.splitlines()] == [
        "gptq, 3 batches, offload='none'", "gptq, 3 batches, offload='disk'"]


@pytest.mark.medium
def test_a_library_model_needs_no_shape():
    text = shown("demo:digits_cnn", activation_bits=None)
    assert "stem.0.weight" in text
    assert "uint8" not in text


def test_a_users_model_does(project):
    with pytest.raises(ConfigError, match="its input shape is not known; give --input-shape"):
        shown(f"{project.module}:net")


def test_a_rule_that_matches_nothing_is_told(project, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("version: 1\nrules:\n  - {match: {path: third}, weight: {bits: 4}}\n")
    with pytest.raises(ConfigError, match=r"rules\[0\] \(path third\): no op has the path third"):
        shown(f"{project.module}:net", input_shapes=["1,6"], config=str(config))


def test_a_width_that_does_not_exist(project):
    with pytest.raises(QtkError, match=r"^weight_bits must be an int from 2 to 16, got 40"):
        shown(f"{project.module}:net", input_shapes=["1,6"], weight_bits=40)


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("1,3,8,8", (1, 3, 8, 8), torch.float32),
        ("1x3x8x8", (1, 3, 8, 8), torch.float32),
        ("4,16:int64", (4, 16), torch.int64),
        ("2:bfloat16", (2,), torch.bfloat16),
    ],
)
def test_shapes(text, shape, dtype):
    assert parse_shape(text) == (shape, dtype)


@pytest.mark.parametrize("text", ["", "1,a", "1,0", "-1,3", "1,3:int65", "1,,3"])
def test_wrong_shapes(text):
    with pytest.raises(ConfigError, match="--input-shape: got"):
        parse_shape(text)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("model", [
    pytest.param("timm:mobilenetv3_small_050", marks=pytest.mark.slow), "demo:digits_vit", "module",
])
def test_a_dry_run_shows_the_same_without_values(model, project):
    model, shapes = (f"{project.module}:net", ["1,6"]) if model == "module" else (model, [])
    plan, dry = (
        [line for line in shown(model, input_shapes=shapes, meta=meta).splitlines() if line.startswith(("│", "param"))]
        for meta in (False, True)
    )
    assert plan == dry
    assert any(line.startswith("parameters: ") for line in dry)


def test_a_dry_run_has_no_weights(project):
    with pytest.raises(ConfigError, match="--meta makes a model without values, and --weights names some: pretrained"):
        shown(f"{project.module}:net", input_shapes=["1,6"], weights="pretrained", meta=True)
