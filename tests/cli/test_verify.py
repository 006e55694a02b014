import json

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import qtk
from qtk.cli import verify as verification
from qtk.cli.app import app
from qtk.report.verdict import Finding, Level

INPUTS = torch.randn(16, 8)


def batches():
    return [(INPUTS, 0), (-INPUTS, 1)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("exported")
    sim = qtk.QuantSim(nn.Linear(8, 4).eval(), INPUTS, config="onnxruntime")
    sim.compute_encodings([INPUTS], progress=False)
    sim.export(folder / "w8a8", formats=["onnx"])
    return folder


def invoke(*arguments):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


@pytest.mark.medium
def test_a_sound_file_exits_with_0_and_prints_the_verdict(exported):
    result = invoke(exported / "w8a8", "--turns", 0)
    assert result.exit_code == 0, result.output
    for part in ("model.onnx: green", "optimizations off", "session.x64quantprecision=1", "1 QGemm", "bytes"):
        assert part in result.stdout


def test_a_red_verdict_exits_with_1(exported, monkeypatch):
    from qtk.workflow import verify_files

    finding = Finding(Level.RED, "wrong numbers", "do not use it")
    monkeypatch.setattr(verify_files, "judge", lambda runs, circumstances: (finding,))
    result = invoke(exported / "w8a8", "--turns", 0)
    assert result.exit_code == 1
    assert "red: wrong numbers; do not use it" in result.stdout


def test_data_and_json(exported):
    result = invoke(exported / "w8a8", "--turns", 0, "--data", f"{__name__}:batches", "--num-batches", 1, "--json")
    assert result.exit_code == 0, result.output
    (record,) = json.loads(result.stdout)
    assert record["runs"][0]["total"]["elements"] == 16 * 4


def test_the_mask_of_tokens_is_named(exported):
    result = invoke(exported / "w8a8", "--turns", 0, "--valid", "mask")
    assert result.exit_code == 1
    assert "valid='mask' must name an input [samples, tokens] of 0 and 1; the inputs are input" in result.stderr


def test_the_float_export_of_a_recipe_is_found(exported, monkeypatch):
    given = []
    monkeypatch.setattr(
        verification, "verify_files", lambda *_, latency, **__: given.append(latency.float_export) or [])
    (exported / "fp32").mkdir()
    invoke(exported / "w8a8")
    invoke(exported / "w8a8", "--float-export", exported / "other")
    invoke(exported / "fp32")
    assert given == [exported / "fp32", exported / "other", None]


@pytest.mark.medium
def test_rows_and_threads_of_the_latency_are_printed(exported):
    result = invoke(exported / "w8a8", "--turns", 1, "--batch-size", 4, "--threads", 1, "--float-export",
                    exported / "w8a8")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "batch 4, 1 thread" in " ".join(lines[:6])
    assert invoke(exported / "w8a8", "--threads", 0).exit_code == 1


def test_a_mistake_is_one_clean_message(tmp_path):
    result = invoke(tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


def test_paths_may_be_text(exported):
    console, file = Console(quiet=True), str(exported / "w8a8" / "model.onnx")
    assert verification.verify(file, console, turns=0)
    assert verification.verify(file, console, turns=0, float_export=file)


def test_all_runtimes_write_a_certificate_that_is_checked_again(exported, tmp_path):
    import shutil

    folder = tmp_path / "out"
    shutil.copytree(exported / "w8a8", folder)
    quiet = ["verify", str(folder), "--turns", "0", "--quiet"]
    written = CliRunner().invoke(app, [*quiet, "--all"])
    assert written.exit_code == 0, written.output
    assert "ONNX Runtime" in written.output
    certificate = (folder / "certificate.json").read_bytes()
    assert json.loads(certificate)["files"].keys() == {"model.onnx"}
    assert CliRunner().invoke(app, [*quiet, "--certificate"]).exit_code == 0
    (folder / "model.onnx").write_bytes((folder / "model.onnx").read_bytes() + b"\x00\x00")
    (folder / "model.onnx.data").write_bytes(b"new")
    changed = CliRunner().invoke(app, [*quiet, "--certificate", "--json"])
    assert changed.exit_code == 1
    first, second, *_ = json.loads(changed.stdout)["worse"]
    assert (first, second) == ("model.onnx has other bytes than were certified", "model.onnx.data is not certified")
    assert (folder / "certificate.json").read_bytes() == certificate


def test_a_certificate_is_written_or_checked_not_both(exported):
    both = CliRunner().invoke(app, ["verify", str(exported / "w8a8"), "--all", "--certificate"])
    assert both.exit_code == 1
    assert "--all writes certificate.json and --certificate checks it; give one of the two" in both.output
    none = CliRunner().invoke(app, ["verify", str(exported / "w8a8"), "--certificate"])
    assert none.exit_code == 1
    assert "no certificate of version 1" in none.output
