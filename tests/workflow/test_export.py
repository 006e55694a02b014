import sys

import pytest
import torch
from torch import nn

from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import CheckError, ConfigError, ExportError
from qtk.export import encodings_aimet, encodings_json
from qtk.export.atomic import MARKER, staged_directory
from qtk.export.onnx import qdq
from qtk.workflow.export import EXPORTERS, export
from tests.export.onnx.simulated import encodings_of, simulate

EXAMPLE = torch.randn(2, 8)


@pytest.fixture(scope="module")
def sim():
    torch.manual_seed(0)
    return simulate(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), EXAMPLE)


def fit() -> None:
    pass


def names(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != MARKER)


def test_all_formats_hold_the_same_encodings(sim, tmp_path):
    encodings = encodings_of(sim)
    export(sim, encodings, EXAMPLE, tmp_path / "out", check=fit)
    assert names(tmp_path / "out") == [
        "encodings.json", "encodings_aimet_1.0.0.json", "encodings_aimet_2.0.0.json", "model.onnx"
    ]
    specs = {site: encoding.spec for site, encoding in encodings.items()}
    for back in (
        encodings_json.read(tmp_path / "out" / "encodings.json"),
        encodings_aimet.read(tmp_path / "out" / "encodings_aimet_1.0.0.json", specs),
        encodings_aimet.read(tmp_path / "out" / "encodings_aimet_2.0.0.json", specs),
        qdq.read(tmp_path / "out" / "model.onnx"),
    ):
        assert set(back) == set(encodings)
        assert all(back[site].equals(encoding) for site, encoding in encodings.items())


def test_a_schema_that_cannot_hold_the_model_is_left_out_and_said(sim, tmp_path):
    spec = QuantSpec(dtype("fp8_e4m3"), symmetric=True)
    floats = {"fc.weight": Encoding(spec, torch.ones(1))}
    with pytest.warns(UserWarning, match=r"one file less: fc\.weight: AIMET's schema 1\.0\.0 holds no fp8_e4m3"):
        export(sim, floats, EXAMPLE, tmp_path / "out", check=fit, formats="encodings")
    assert names(tmp_path / "out") == ["encodings.json", "encodings_aimet_2.0.0.json"]
    assert encodings_json.read(tmp_path / "out" / "encodings.json")["fc.weight"].equals(floats["fc.weight"])
    with pytest.raises(ExportError, match="holds no fp8_e4m3"):
        export(sim, floats, EXAMPLE, tmp_path / "one", check=fit, formats="encodings_aimet_1.0.0")


@pytest.mark.parametrize("name", ["encodings_json", "encodings_aimet_1.0.0", "encodings_aimet_2.0.0", "onnx"])
def test_each_format_alone(name, sim, tmp_path):
    export(sim, encodings_of(sim), EXAMPLE, tmp_path / "out", check=fit, formats=(name, name))
    assert len(names(tmp_path / "out")) == 1


def test_a_format_that_fails_leaves_nothing(sim, tmp_path, monkeypatch):
    def failing(*args: object) -> None:
        raise ExportError("disk gone")

    monkeypatch.setattr(qdq, "export", failing)
    with pytest.raises(ExportError, match="disk gone"):
        export(sim, encodings_of(sim), EXAMPLE, tmp_path / "out", check=fit)
    assert list(tmp_path.iterdir()) == []


def test_the_check_runs_before_anything_is_written(sim, tmp_path):
    def unfit() -> None:
        raise CheckError("fc: saw no data")

    with pytest.raises(CheckError, match="saw no data"):
        export(sim, encodings_of(sim), EXAMPLE, tmp_path / "out", check=unfit)
    assert list(tmp_path.iterdir()) == []


def test_unknown_formats_are_refused_with_the_known_ones(sim, tmp_path):
    with pytest.raises(ConfigError, match="unknown export format 'onx'; did you mean 'onnx'"):
        export(sim, encodings_of(sim), EXAMPLE, tmp_path / "out", check=fit, formats=("onx",))
    with pytest.raises(ExportError, match="no formats to export; choose from encodings"):
        export(sim, encodings_of(sim), EXAMPLE, tmp_path / "out", check=fit, formats=())
    assert "onnx" in EXPORTERS


def test_nothing_is_overwritten_unasked(sim, tmp_path):
    with staged_directory(tmp_path / "out") as folder:
        (folder / "mine").write_text("mine")
    arguments = (sim, encodings_of(sim), EXAMPLE, tmp_path / "out")
    with pytest.raises(ExportError, match="exists already"):
        export(*arguments, check=fit, formats=("encodings",))
    assert names(tmp_path / "out") == ["mine"]
    export(*arguments, check=fit, formats=("encodings_json",), force=True)
    assert names(tmp_path / "out") == ["encodings.json"]


def test_without_onnx_the_extra_is_named(sim, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "qtk.export.onnx.qdq", None)
    monkeypatch.delattr("qtk.export.onnx.qdq", raising=False)
    with pytest.raises(ExportError, match=r"pip install 'qtk\[onnx\]'"):
        export(sim, encodings_of(sim), EXAMPLE, tmp_path / "out", check=fit, formats=("onnx",))
