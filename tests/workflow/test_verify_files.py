import subprocess
import sys

import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError, ExportError
from qtk.report.verdict import Level
from qtk.runtimes.session import integer_sums_saturate
from qtk.workflow.verify_export import LatencyRequest
from qtk.workflow.verify_files import REFERENCE, _counted, verify_files
from tests.export.onnx.without_vnni import QEMU

INPUTS = torch.rand(64, 64)  # as the random values that are verified with, so that outputs are not clipped


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One layer whose sums are as large as they get, by two targets."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    layer = nn.Linear(64, 8).eval()
    nn.init.uniform_(layer.weight, 0.8, 1.0)
    for config in ("onnxruntime", "onnxruntime_vnni"):
        sim = qtk.QuantSim(layer, INPUTS, config=config)
        sim.compute_encodings([INPUTS], progress=False)
        with pytest.warns() if config != "onnxruntime" else pytest.MonkeyPatch.context():
            sim.export(folder / config, formats=["onnx"])
    return folder


def verified(folder, *data, float_export=None, **options):
    latency = LatencyRequest(0, float_export=float_export)
    (verdict,) = verify_files(folder, *data, latency=latency, progress=False, **options)
    return verdict


@pytest.mark.medium
def test_random_values_within_the_range_of_the_input(written):
    verdict = verified(written / "onnxruntime")
    assert verdict.level is Level.GREEN
    assert verdict.reference == REFERENCE
    assert verdict.exact.differing == 0.0
    assert verdict.optimized.nodes.integer == {"QGemm": 1}
    assert [site.name for site in verdict.exact.sites] == ["input:input", "linear:out"]
    assert verdict.exact.total.max_steps == 0.0  # in the scale of the output's site


@pytest.mark.skipif(integer_sums_saturate(), reason="the CPU itself shows it")
def test_weights_that_would_saturate_are_named_on_every_cpu(written):
    verdict = verified(written / "onnxruntime_vnni")
    (finding,) = verdict.findings
    assert (verdict.level, finding.level) == (Level.YELLOW, Level.YELLOW)
    assert "u8 × s8 products of weight can saturate on x86 without VNNI" in finding.cause
    assert "config='onnxruntime'" in finding.remedy
    assert "session.x64quantprecision=1" in finding.remedy


@pytest.mark.parametrize("batch", [INPUTS, (INPUTS,), {"input": INPUTS}, [INPUTS]])
def test_batches_of_every_kind(written, batch):
    assert verified(written / "onnxruntime", [batch]).exact.total.elements == 64 * 8


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, mask):
        return self.layer(x).masked_fill(mask[..., None] == 0, 0.0)


@pytest.mark.medium
def test_tokens_that_do_not_count_are_not_compared(tmp_path):
    x, mask = torch.randn(4, 6, 8), torch.ones(4, 6, dtype=torch.int64)
    mask[:, 4:] = 0
    sim = qtk.QuantSim(Masked().eval(), (x, mask), config="onnxruntime")
    sim.compute_encodings([(x, mask)], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    counts = {valid: verified(tmp_path / "out", [(x, mask)], valid=valid) for valid in ((), ("mask",))}
    assert [verdict.exact.total.elements for verdict in counts.values()] == [4 * 6 * 4, 4 * 4 * 4]
    sites = {site.name: site.elements for site in counts["mask",].exact.sites}
    assert sites["x:input"] == 4 * 4 * 8
    for name in ("x", "other"):
        with pytest.raises(ExportError, match=rf"valid='{name}' must name an input .*mask \[4, 6\]"):
            verified(tmp_path / "out", [(x, mask)], valid=(name,))


def test_elements_of_tokens_are_found_by_their_axes():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    assert _counted(torch.zeros(2, 3, 5), [mask]).sum() == 3 * 5
    assert torch.equal(_counted(torch.zeros(6, 5), [mask])[:, 0], mask.flatten())
    assert _counted(torch.zeros(2, 5), [mask]) is None
    assert _counted(torch.zeros(2, 4, 5), [mask, torch.ones(2, 4).bool()]).all()


def test_a_spoilt_optimization_is_seen(written, monkeypatch):
    from qtk.runtimes import file_runs

    original = file_runs.Way.values

    def values(way, feed):
        result = original(way, feed)
        return result if way.way == "optimizations off" else {name: value * 2 for name, value in result.items()}

    monkeypatch.setattr(file_runs.Way, "values", values)
    assert verified(written / "onnxruntime", [INPUTS]).level is Level.RED
    assert verified(written / "onnxruntime").level is Level.YELLOW  # random inputs


def open_disk():
    raise OSError("disk")


@pytest.mark.medium
def test_bad_input(written, tmp_path):
    with pytest.raises(ExportError, match=r"holds no \.onnx file"):
        verify_files(tmp_path)
    with pytest.raises(ExportError, match=r"absent does not exist; give what sim\.export"):
        verify_files(tmp_path / "absent")
    with pytest.raises(ExportError, match=r"holds no \.onnx file.*; name one of onnxruntime, onnxruntime_vnni"):
        verify_files(written)
    with pytest.raises(ExportError, match="a batch has 2 tensors"):
        verified(written / "onnxruntime", [{"a": INPUTS, "b": INPUTS}])
    with pytest.raises(CalibrationError, match="batch 0 of the data cannot be read: OSError: disk"):
        verified(written / "onnxruntime", (open_disk() for _ in range(2)))
    with pytest.raises(ExportError, match="no batches"):
        verified(written / "onnxruntime", [])
    with pytest.raises(ExportError, match="unknown runtime 'tvm'; choose from onnxruntime, openvino"):
        verified(written / "onnxruntime", runtime="tvm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: name)
        with pytest.raises(ExportError, match=r"LiteRT runs \.tflite files, .* qtk verify --all"):
            verified(written / "onnxruntime", runtime="litert")
    with pytest.raises(ExportError, match=r"there is no float export .*model\.onnx"):
        verified(written / "onnxruntime", [INPUTS], float_export=tmp_path)
    for name in ("a", "b"):
        onnx.save(onnx.load(written / "onnxruntime" / "model.onnx"), tmp_path / f"{name}.onnx")
    with pytest.raises(ExportError, match="holds 2 files, and data fits one"):
        verify_files(tmp_path, [INPUTS])
    assert len(verify_files(tmp_path, latency=LatencyRequest(0), progress=False)) == 2


@pytest.mark.slow  # tests/report/test_findings.py and test_verify_export.py pretend to be such a CPU
@pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 is not installed")
@pytest.mark.parametrize(("config", "level"), [("onnxruntime", "green"), ("onnxruntime_vnni", "red")])
def test_a_cpu_without_vnni_shows_what_saturates(config, level, written):
    command = [sys.executable, "-m", "qtk.cli.app", "verify", str(written / config), "--turns", "0"]
    run = subprocess.run([QEMU, "-cpu", "Haswell", *command], capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == (1 if level == "red" else 0), run.stderr
    assert f"model.onnx: {level}" in run.stdout
    assert ("u8 × s8 saturates on this CPU" in run.stdout) == (level == "red")
    assert ("linear:out departs" in run.stdout) == (level == "red")


@pytest.mark.medium
def test_half_precision_is_named(tmp_path):
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 8).eval().half(), INPUTS.half()
    sim = qtk.QuantSim(layer, x, config="onnxruntime")
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    assert "simulate and export model.float()" in [finding.remedy for finding in verified(tmp_path / "out").findings]
