"""Files with values that ONNX has no operators for, computed from parameters: stored, as the simulation has them."""

import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from tests.export.onnx.simulated import run_onnx

X = torch.randn(16, 6)


class Mixing(nn.Module):
    """A matrix made from a parameter, whose logarithm of the determinant is returned too."""

    def __init__(self, matrix):
        super().__init__()
        self.weight, self.scale, self.matrix = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 6), matrix

    def forward(self, x):
        matrix = self.matrix(self.weight)
        return self.scale(nn.functional.linear(x, matrix)), torch.slogdet(matrix)[1]


MATRICES = {
    "itself, which is quantized": lambda w: w, "inverse": torch.inverse,
    "orthogonal": lambda w: torch.linalg.qr(w)[0], "exponential": lambda w: torch.matrix_exp(w - w.T),
}


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", MATRICES)
def test_matrices_computed_from_a_parameter_are_stored(name, tmp_path):
    torch.manual_seed(0)
    sim = qtk.QuantSim(Mixing(MATRICES[name]).eval(), X, config="onnxruntime")
    sim.compute_encodings([X], progress=False)
    sim.export(tmp_path / "out", formats=("onnx", "encodings_aimet_1.0.0", "pt2e"), progress=False)
    expected = sim.model(X)
    scale = sim.encodings()["scale:out"].scale
    mixed, determinant = map(torch.from_numpy, run_onnx(tmp_path / "out" / "model.onnx", X))
    assert (mixed - expected[0]).abs().max() < 1.01 * scale
    torch.testing.assert_close(determinant, expected[1])
    stored = sum(len(each.dims) == 2 for each in onnx.load(tmp_path / "out" / "model.onnx").graph.initializer)
    assert stored == 2  # both weights, and no matrix that they were made of


@pytest.mark.medium
def test_a_weight_that_torch_keeps_orthogonal(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 3)).eval()
    sim = qtk.QuantSim(model, X, config="onnxruntime")
    sim.compute_encodings([X], progress=False)
    sim.export(tmp_path / "out", progress=False)
    (found,) = run_onnx(tmp_path / "out" / "model.onnx", X)
    assert (torch.from_numpy(found) - sim.model(X)).abs().max() < 1.01 * sim.encodings()["2:out"].scale


class Drawn(nn.Module):
    """A matrix that is drawn anew in each call."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        return self.fc(x) @ torch.inverse(torch.randn(6, 6))


@pytest.mark.medium
def test_random_numbers_are_no_constants(tmp_path):
    sim = qtk.QuantSim(Drawn().eval(), X, activation_bits=None)
    sim.compute_encodings([X], progress=False)
    with pytest.raises(ExportError, match=r"no ONNX operators for aten\.inverse"):
        sim.export(tmp_path / "out", formats=("onnx",), progress=False)
