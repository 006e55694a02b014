import hashlib

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.report.verdict import Level
from qtk.runtimes.kinds import RUNTIMES
from qtk.workflow.certify import FLAGS, certify
from qtk.workflow.verify_export import LatencyRequest
from tests.export.coreai.small_file import needs_converter as needs_coreai
from tests.export.coreai.small_file import small as small_coreai
from tests.export.litert.small_file import needs_converter, small

QUICK = LatencyRequest(turns=0)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval(), torch.randn(16, 8)
    sim = qtk.QuantSim(model, x, config="onnxruntime")
    sim.compute_encodings([x], progress=False)
    folder = tmp_path_factory.mktemp("certified") / "out"
    sim.export(folder, formats=("onnx", "encodings_json"))
    return folder, x


def test_it_holds_hashes_versions_and_every_runtime_that_is_installed(exported):
    folder, x = exported
    found = certify(folder, [x], latency=QUICK, progress=False)
    assert found.level is Level.GREEN
    assert found.reference == "ONNX Runtime, optimizations off"
    assert found.files == {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
                           for name in ("encodings.json", "model.onnx")}
    assert found.versions["torch"] == torch.__version__.partition("+")[0]
    assert set(found.cpu["flags"].split()) <= set(FLAGS)
    assert [run.way for run in found.runs][:2] == ["optimizations off", "optimizations on"]
    assert all(run.beyond_one_step == 0 for run in found.runs)
    assert found.absent == {kind.title: kind.missing for kind in RUNTIMES.values() if kind.missing}


def test_random_inputs_are_the_same_again_and_data_are_others(exported):
    folder, x = exported
    first, second = (certify(folder, latency=QUICK, progress=False) for _ in range(2))
    assert first.changes(second) == ([], [])
    of_data = certify(folder, [x], latency=QUICK, progress=False)
    assert first.changes(of_data)[1] == ["the inputs are not the inputs of the certificate"]


def test_what_cannot_be_certified_has_a_way_out(exported, tmp_path):
    with pytest.raises(ExportError, match="is no directory; give what"):
        certify(tmp_path / "none")
    with pytest.raises(ExportError, match=r"holds no file of \.onnx, \.pt2, \.tflite to certify; export with"):
        certify(tmp_path)
    with pytest.raises(ExportError, match="no batches to certify"):
        certify(exported[0], [], latency=QUICK)


@needs_converter
def test_litert_is_compared_with_the_program_beside_it_and_a_changed_file_is_worse(tmp_path):
    import shutil

    _, x, folder = small()
    shutil.copytree(folder, tmp_path / "out")
    found = certify(tmp_path / "out", [x], latency=QUICK, progress=False)
    runs = {run.way: run for run in found.runs}
    assert found.reference == "the exported program in torch"
    assert runs["LiteRT"].beyond_one_step == 0
    assert runs["LiteRT"].float_nodes == 0
    path = tmp_path / "out" / "model.tflite"
    path.write_bytes(path.read_bytes() + b"\0")
    worse, _ = found.changes(certify(tmp_path / "out", [x], latency=QUICK, progress=False))
    assert worse == ["model.tflite has other bytes than were certified"]


@needs_coreai
def test_a_directory_that_is_one_file_is_certified_and_a_change_inside_it_is_worse(tmp_path):
    import shutil

    _, x, folder = small_coreai()
    shutil.copytree(folder, tmp_path / "out")
    found = certify(tmp_path / "out", [x], latency=QUICK, progress=False)
    (run,) = (run for run in found.runs if run.way == "Core AI")
    assert run.file == "model.aimodel"
    assert run.beyond_one_step == 0
    assert "model.aimodel/main.mlirb" in found.files
    path = tmp_path / "out" / "model.aimodel" / "metadata.json"
    path.write_bytes(path.read_bytes() + b" ")
    worse, _ = found.changes(certify(tmp_path / "out", [x], latency=QUICK, progress=False))
    assert worse == ["model.aimodel/metadata.json has other bytes than were certified"]
    (tmp_path / "out" / "model.pt2").unlink()
    with pytest.raises(ExportError, match=r"model\.aimodel has no file beside it .*'pt2e'"):
        certify(tmp_path / "out", [x])
