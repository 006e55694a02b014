import dataclasses
import math
import sys

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from qtk.errors import CalibrationError, ExportError
from qtk.export.onnx.qdq import export
from qtk.export.onnx.session import integer_sums_saturate
from qtk.workflow.verify_export import verify_export, verify_onnx
from tests.export.onnx.simulated import nothing, simulate


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 6)

    def forward(self, x, *, shift):
        return {"logits": self.fc(x), "shifted": x * 2 + shift}


def batches(count=3, size=5):
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(size, 8, generator=generator), "shift": torch.randn(size, 8, generator=generator)}
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    torch.manual_seed(0)
    sim = simulate(TwoOutputs(), batches()[0])
    directory = tmp_path_factory.mktemp("out")
    export(sim, batches()[0], directory / "model.onnx")
    return sim, directory


def spoilt(directory, target, suffix, change):
    """A copy of the file with one initializer changed."""
    model = onnx.load(directory / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.name.endswith(suffix):
            array = onnx.numpy_helper.to_array(tensor).copy()
            tensor.CopyFrom(onnx.numpy_helper.from_array(change(array).astype(array.dtype), tensor.name))
    onnx.save(model, target / "model.onnx")
    return target


def test_the_exported_file_agrees(written):
    sim, directory = written
    result = verify_export(sim, directory, batches())
    assert result.path == directory / "model.onnx"
    assert result.exact.top1 >= 0.9
    assert result.exact.differing <= 0.01
    assert result.exact.max_difference_scales <= 1.001
    assert result.optimized.max_difference_scales <= 2.001
    assert "optimizations off" in result.exact.runtime
    assert "optimizations on" in result.optimized.runtime
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.exact = None


def test_one_session_runs_as_written_and_one_as_it_comes(written, monkeypatch):
    levels = []

    class Session(onnxruntime.InferenceSession):
        def __init__(self, path, options, **rest):
            levels.append(options.graph_optimization_level)
            super().__init__(path, options, **rest)

    integer_sums_saturate()  # opens a session of its own, once
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    verify_export(*written, batches(1))
    level = onnxruntime.GraphOptimizationLevel
    assert levels == [level.ORT_DISABLE_ALL, level.ORT_ENABLE_ALL]


def test_it_prints_what_it_found(written):
    sim, directory = written
    text = str(verify_export(sim, directory, batches()))
    assert text.count("top-1 equal") == 2
    assert text.count("scales)") == 2


@pytest.mark.parametrize(
    ("suffix", "change", "scales"),
    [
        ("fc:out.zero_point", lambda array: array + 1, 0.99),
        ("mul:out.scale", lambda array: array * 2, 0.99),
        ("fc.weight", lambda array: -array, 10.0),
    ],
)
def test_a_wrong_file_is_seen(suffix, change, scales, written, tmp_path):
    sim, directory = written
    result = verify_export(sim, spoilt(directory, tmp_path, suffix, change), batches())
    assert result.exact.max_difference_scales >= scales
    assert result.exact.differing > 0.02
    assert result.optimized.max_difference_scales >= scales


def test_the_difference_is_measured_in_the_scales_of_its_own_output(written, tmp_path):
    sim, directory = written
    result = verify_export(sim, spoilt(directory, tmp_path, "fc:out.zero_point", lambda array: array + 1), batches())
    scale = float(sim.get_submodule("qtk_quantizers.fc:out").scale)
    assert math.isclose(result.exact.max_difference, scale, rel_tol=1e-4)
    assert math.isclose(result.exact.max_difference_scales, 1.0, rel_tol=1e-4)


def test_top1_counts_rows(written, tmp_path):
    sim, directory = written
    result = verify_export(sim, spoilt(directory, tmp_path, "fc.weight", lambda array: array * 0), batches())
    with torch.no_grad():
        expected = [sim(**batch)["logits"].argmax(-1) for batch in batches()]
    constant = torch.cat(expected) == sim.get_parameter("fc.bias").argmax()
    assert result.exact.top1 == int(constant.sum()) / len(constant)


def test_forward_and_data_that_run_themselves(written):
    sim, directory = written
    loader = [(batch, "label") for batch in batches()]
    plain = verify_export(sim, directory, batches())
    assert verify_export(sim, directory, loader, forward=lambda model, batch: model(**batch[0])["logits"]) == plain

    def loop(model):
        for batch in batches():
            model(**batch)

    assert verify_export(sim, directory, loop) == plain


def test_outputs_without_a_quantizer_have_no_scales(tmp_path):
    sim = simulate(nn.Linear(8, 4), torch.randn(2, 8), activation=nothing)
    export(sim, torch.randn(2, 8), tmp_path / "model.onnx")
    result = verify_onnx(tmp_path / "model.onnx", sim, [torch.randn(5, 8)])
    assert result.exact.max_difference_scales is None
    assert result.exact.max_difference < 1e-5


def test_the_training_flags_come_back(written):
    sim, directory = written
    sim.train()
    verify_export(sim, directory, batches(1))
    assert sim.training
    sim.eval()


def test_bad_input(written, tmp_path):
    sim, directory = written
    with pytest.raises(ExportError, match=r"holds no model.onnx to verify"):
        verify_export(sim, tmp_path, batches())
    with pytest.raises(CalibrationError, match="no batches"):
        verify_export(sim, directory, [])
    (tmp_path / "model.onnx").write_text("no protobuf")
    with pytest.raises(ExportError, match="cannot load it"):
        verify_export(sim, tmp_path, batches())


class OneInput(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, x):
        return tuple(x * (factor + 2) for factor in range(self.outputs))


def test_a_file_of_another_model(written, tmp_path):
    one, two = (simulate(OneInput(outputs), torch.randn(2, 8)) for outputs in (1, 2))
    with pytest.raises(ExportError, match="the file takes x, shift, the model x; verify a file with"):
        verify_export(one, written[1], [torch.randn(2, 8)])
    export(one, torch.randn(2, 8), tmp_path / "model.onnx")
    with pytest.raises(ExportError, match="the file returns 1 tensors, the model 2"):
        verify_export(two, tmp_path, [torch.randn(2, 8)])
    with pytest.raises(ExportError, match="cannot run the file"):
        verify_export(one, tmp_path, [torch.randn(2, 8, dtype=torch.float64)])


def test_without_onnxruntime_the_extra_is_named(written, monkeypatch):
    sim, directory = written
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ExportError, match=r'pip install "qtk\[onnx\]"'):
        verify_export(sim, directory, batches())
