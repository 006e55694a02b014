import importlib.util
import sys

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.runtimes.inductor_program import FLOAT, INTEGER, InductorProgram

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def test_without_torchao_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer", None)
    with pytest.raises(ExportError, match=r"pip install 'qtk\[torchao\]'"):
        InductorProgram(tmp_path / "model.pt2", {})


@pytest.mark.parametrize(("line", "integer"), [
    ("buf1 = torch.ops.onednn.qlinear_pointwise.tensor(buf0)", "qlinear_pointwise"),
    ("buf1 = torch.ops.onednn.qconv_pointwise.default(buf0)", "qconv_pointwise"),
    ("extern_kernels.addmm(buf0, buf1)", None), ("torch.ops.mkl._mkl_linear(buf0)", None),
])
def test_calls_of_layers_are_found_in_the_code(line, integer):
    assert INTEGER.findall(line) == ([] if integer is None else [integer])
    assert bool(FLOAT.findall(line)) is (integer is None)


@needs_torchao
@pytest.mark.medium
def test_a_layer_is_compiled_and_computes_the_simulation(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5)).eval(), torch.randn(8, 16)
    sim = qtk.QuantSim(model, x, config="x86_inductor")
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats="pt2e")
    (run,) = sim.verify_export(tmp_path / "out", [x], runtime="inductor", turns=0).runs
    assert run.sqnr_db > 35
    assert sum(run.nodes.integer.values()) + len(run.nodes.floats) == 2


@needs_torchao
@pytest.mark.medium
def test_a_program_stays_compiled_with_the_patterns_whatever_is_loaded_after_it(tmp_path):
    counters = torch._dynamo.utils.counters
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5)).eval(), torch.randn(8, 16)
    sim = qtk.QuantSim(model, x, config="x86_inductor")
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats="pt2e")
    threads = torch.get_num_threads() + 1
    program, other = (InductorProgram(tmp_path / "out" / "model.pt2", {}, threads=threads) for _ in range(2))
    for loaded, rows in ((program, 8), (program, 1), (other, 8)):
        loaded.run({loaded.inputs[0]: x[:rows]})
        assert sum(loaded.nodes().integer.values()) == 2
    before = counters["stats"]["unique_graphs"], counters["aot_autograd"]["total"]
    for rows in (8, 1):
        program.run({program.inputs[0]: x[:rows]})
        with torch.inference_mode():
            program.run({program.inputs[0]: x[:rows]})
    assert (counters["stats"]["unique_graphs"], counters["aot_autograd"]["total"]) == before
