"""``qtk diff``: the exit code tells a difference, and JSON holds it."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import qtk
from qtk.cli.app import app


@pytest.fixture
def folders(tmp_path):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    sim = qtk.QuantSim(nn.Linear(4, 2).eval(), x)
    sim.compute_encodings([x], progress=False)
    sim.save(tmp_path / "a")
    sim.set_range("linear:out", low=-9.0, high=9.0)
    sim.save(tmp_path / "b")
    return tmp_path


def test_the_exit_code_is_1_where_anything_differs(folders):
    equal = CliRunner().invoke(app, ["diff", str(folders / "a"), str(folders / "a")])
    assert equal.exit_code == 0
    assert "no difference" in equal.output
    other = CliRunner().invoke(app, ["diff", str(folders / "a"), str(folders / "b")])
    assert other.exit_code == 1
    assert "linear:out" in other.output
    written = CliRunner().invoke(app, ["diff", str(folders / "a"), str(folders / "b"), "--json"])
    assert written.exit_code == 1
    assert [each["site"] for each in json.loads(written.output)["sites"]] == ["linear:out"]
    missing = CliRunner().invoke(app, ["diff", str(folders / "a"), str(folders / "c")])
    assert missing.exit_code == 1
    assert "holds nothing to compare" in missing.output


def test_runtimes_are_two(folders):
    given = CliRunner().invoke(app, ["diff", str(folders / "a"), str(folders / "a"), "--runtimes", "onnxruntime-on"])
    assert given.exit_code == 1
    assert "takes two, with a comma between, got 'onnxruntime-on'" in " ".join(given.output.split())
    named = CliRunner().invoke(app, ["diff", str(folders / "a"), str(folders / "a"), "--runtimes",
                                     "onnxruntime-off,onnxruntime-on"])
    assert named.exit_code == 1
    assert "runtimes run two single ONNX files on data" in " ".join(named.output.split())
