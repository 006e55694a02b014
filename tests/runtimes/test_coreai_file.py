import subprocess
import sys

import pytest
import torch

from qtk.errors import ExportError
from qtk.report.verdict import Level
from qtk.runtimes.coreai_file import CoreAiFile
from tests.export.coreai.small_file import needs_converter, small


def test_without_the_runtime_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "coreai.authoring", None)
    with pytest.raises(ExportError, match=r"needs the packages .* missing; pip install 'qtk\[coreai\]'"):
        CoreAiFile(tmp_path / "model.aimodel", {})


@needs_converter
def test_any_number_of_rows_is_what_was_simulated_bit_for_bit():
    sim, x, folder = small()
    loaded = CoreAiFile(folder / "model.aimodel", {})
    assert (loaded.inputs, loaded.outputs, loaded.nodes()) == (["input"], ["output"], None)
    for rows in (x, x[:1], torch.randn(19, 3, 6, 6)):
        assert torch.equal(loaded.run({"input": rows})["output"][0], sim.model(rows))
    with pytest.raises(RuntimeError):
        loaded.run({"other": x})
    assert torch.equal(torch.from_numpy(loaded.timed({"input": x})()["output"]), sim.model(x))


@needs_converter
def test_the_process_ends_by_itself(tmp_path):
    program = ("import torch; from pathlib import Path; from qtk.runtimes.coreai_file import CoreAiFile\n"
               f"loaded = CoreAiFile(Path({str(small()[2] / 'model.aimodel')!r}), {{}})\n"
               "loaded.run({'input': torch.zeros(1, 3, 6, 6)})")
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


@needs_converter
def test_a_verdict_has_no_latency_elsewhere_than_on_a_mac():
    sim, x, folder = small()
    verdict = sim.verify_export(folder, [x], runtime="coreai", progress=False)
    (run,) = verdict.runs
    assert run.total.differing == 0
    assert verdict.level is Level.GREEN
    assert (run.latency_ms is None) == (sys.platform != "darwin")
