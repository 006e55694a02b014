"""Parts of models in bfloat16 and float64, in ONNX Runtime against the simulation."""

import warnings

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.runtimes.session import create_session


class Part(nn.Module):
    """A linear layer whose output goes through ``function``."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self.layer(x))


def alibi(x):
    slopes = torch.tensor([0.53, 0.27], dtype=torch.bfloat16)
    position = torch.arange(x.shape[1], device=x.device)[None].to(torch.bfloat16)
    return x + (slopes[:, None] * position).to(x.dtype).sum(0)[None, :, None]


def positions(x):
    return x + F.gelu(torch.linspace(0, 1, 8, dtype=torch.float64) * 3.3).float()


PARTS = {  # function, whether the file is exact
    "constants in bfloat16": (alibi, True),
    "a gate in bfloat16": (lambda x: x * torch.sigmoid(x.bfloat16() * 1.5).float(), False),
    "a product in bfloat16": (lambda x: (x.bfloat16() @ x.bfloat16().transpose(1, 2)).float(), False),
    "several ops in bfloat16": (lambda x: ((x.bfloat16() + 1) * x.bfloat16() - 2).float(), True),
    "moved in bfloat16": (lambda x: x.bfloat16().transpose(1, 2).reshape(x.shape[0], -1).float(), True),
    "constants in float64": (positions, True),
    "an op in float64": (lambda x: F.gelu(x.double()).float(), True),
    "comparison in bfloat16": (lambda x: torch.where(x.bfloat16() > 0.25, x, -x), True),
}


def run(folder, x):
    results = []
    for optimized in (False, True):
        session, _ = create_session(folder / "model.onnx", optimized=optimized)
        (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        results.append(torch.from_numpy(output))
    return results


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", PARTS)
def test_small_parts_in_another_float_type_run_and_round_as_in_the_simulation(name, tmp_path):
    torch.manual_seed(0)
    function, is_exact = PARTS[name]
    x = torch.randn(3, 5, 8)
    sim = qtk.QuantSim(Part(function).eval(), x, weight_bits=8, activation_bits=None)
    sim.compute_encodings([x], progress=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*was written, but")
        warnings.filterwarnings("error", message=".*bfloat16")
        sim.export(tmp_path / "out", formats=("onnx",))
    expected = sim.model(x).detach()
    for found in run(tmp_path / "out", x):
        # a value between two of bfloat16 may be rounded the other way, where float sums differ in the last place
        torch.testing.assert_close(found, expected, rtol=0 if is_exact else 2**-7, atol=2e-6)


@pytest.mark.medium
def test_a_float64_model_keeps_its_inputs_and_runs(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8).double()
    sim = qtk.QuantSim(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).double().eval(), x)
    sim.compute_encodings([x], progress=False)
    with pytest.warns(match=r"model\.onnx: ONNX Runtime has no float64 kernel of Conv on the CPU.*model\.float\(\)"):
        sim.export(tmp_path / "out", formats=("onnx",))
    file = onnx.load(tmp_path / "out" / "model.onnx")
    assert [each.type.tensor_type.elem_type for each in (*file.graph.input, *file.graph.output)] == [
        onnx.TensorProto.DOUBLE] * 2
    expected = sim.model(x).detach()
    step = float(sim.encodings()["3:out"].scale)
    for found in run(tmp_path / "out", x):
        assert float((found - expected).abs().max()) < 1.01 * step


@pytest.mark.medium
def test_a_float32_model_is_written_as_before(tmp_path, monkeypatch):
    x = torch.randn(3, 5, 8)
    sim = qtk.QuantSim(Part(torch.relu).eval(), x)
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "one", formats=("onnx",))
    monkeypatch.setattr("qtk.export.onnx.qdq.compute_in_float32", lambda model: ())
    sim.export(tmp_path / "two", formats=("onnx",))
    assert (tmp_path / "one/model.onnx").read_bytes() == (tmp_path / "two/model.onnx").read_bytes()
