"""Operators on complex numbers against torch: written through real numbers, and in files."""

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.export.onnx.complex_ops import DECOMPOSED, OF_COMPLEX
from tests.export.onnx.simulated import run_onnx

torch.manual_seed(0)
Z, W, REAL = (torch.randn(2, 3, 4, dtype=each) for each in (torch.complex64, torch.complex64, torch.float32))
ATEN = torch.ops.aten
INDEX = torch.tensor([2, 0])

CALLS = {
    ATEN.unsqueeze.default: [(Z, dim) for dim in (0, 3, -1, -4)], ATEN.squeeze.default: [(Z[:1, :, :1],)],
    ATEN.squeeze.dim: [(Z[:, :1], dim) for dim in (1, -2)], ATEN.squeeze.dims: [(Z[:1, :, :1], [0, -1])],
    ATEN.pad.default: [(Z, (1, 2)), (Z, (0, 1, 2, 0), "constant", None)],
    ATEN.constant_pad_nd.default: [(Z, (1, 2)), (Z, (0, 1), 0)], ATEN.reshape.default: [(Z, (3, -1))],
    ATEN.view.default: [(Z, (6, 4))], ATEN.flatten.using_ints: [(Z,), (Z, 1), (Z, -2, -1)],
    ATEN.expand.default: [(Z[:1], (5, -1, 4))], ATEN.repeat.default: [(Z, (2, 1, 3))],
    ATEN.select.int: [(Z, dim, 1) for dim in (0, -1)], ATEN.index_select.default: [(Z, -2, INDEX)],
    ATEN.index.Tensor: [(Z, [None, INDEX]), (Z, [INDEX % 2, INDEX])],
    ATEN.gather.default: [(Z, -1, torch.tensor([[[3, 1]]]))], ATEN.unbind.int: [(Z,), (Z, -1)],
    ATEN.chunk.default: [(Z, 2, -1)], ATEN.split.Tensor: [(Z, 3, 2)], ATEN.split_with_sizes.default: [(Z, [1, 3], -1)],
    ATEN.slice_scatter.default: [(Z, W[..., :2], -1, 1, 3), (Z, REAL[:, :1], 1, 2)],
    ATEN.select_scatter.default: [(Z, W[:, 0], 1, 2)],
    ATEN.matmul.default: [(Z, W.mT), (Z, W[0, 0])], ATEN.mm.default: [(Z[0], W[0].mT)], ATEN.bmm.default: [(Z, W.mT)],
    ATEN.einsum.default: [("bim,bom->bio", [Z, W]), ("bim->mib", [Z])],
    ATEN.mul.Tensor: [(Z, W), (Z, REAL), (REAL, Z)], ATEN.div.Tensor: [(Z, REAL), (Z, W), (Z, 3.0)],
    ATEN.add.Tensor: [(Z, REAL), (REAL, Z)], ATEN.sub.Tensor: [(Z, REAL), (REAL, Z)],
    ATEN.zeros.default: [((2, 3),)], ATEN.ones.default: [((2, 3),)], ATEN.empty.memory_format: [((2, 3),)],
    ATEN.zeros_like.default: [(Z,)], ATEN.empty_like.default: [(Z,)], ATEN.new_zeros.default: [(Z, (2, 1))],
    ATEN.new_empty.default: [(Z, (2, 1))], ATEN.where.self: [(REAL > 0, Z, W), (REAL > 0, Z, REAL)],
    ATEN.exp.default: [(Z,)], ATEN.polar.default: [(REAL, REAL + 1)], ATEN.to.dtype: [(REAL, torch.complex64)],
    ATEN._to_copy.default: [(REAL,)],
}
DTYPE = {ATEN.zeros.default, ATEN.ones.default, ATEN.empty.memory_format, ATEN._to_copy.default}


def test_every_operator_is_called_here():
    assert set(CALLS) == set(OF_COMPLEX)


@pytest.mark.parametrize("op", CALLS, ids=str)
def test_what_torch_computes(op):
    for args in CALLS[op]:
        options = {"dtype": torch.complex64} if op in DTYPE else {}
        found, expected = OF_COMPLEX[op](*args, **options), op(*args, **options)
        if "empty" in str(op):
            found, expected = torch.zeros_like(found), torch.zeros_like(expected)
        torch.testing.assert_close(tuple(found) if isinstance(expected, (list, tuple)) else found, tuple(
            expected) if isinstance(expected, (list, tuple)) else expected)


def test_real_numbers_are_left_to_torch():
    assert OF_COMPLEX[ATEN.unsqueeze.default](REAL, 0) is NotImplemented
    assert OF_COMPLEX[ATEN.matmul.default](REAL, REAL.mT) is NotImplemented
    assert OF_COMPLEX[ATEN.zeros.default]((2,)) is NotImplemented
    assert OF_COMPLEX[ATEN.pad.default](Z, (1, 1), "constant", 2.0) is NotImplemented
    assert ATEN.einsum.default not in DECOMPOSED  # an entry would decompose it for real numbers too


class Spectral(nn.Module):
    """A layer of a Fourier neural operator, its complex product in one of three spellings."""

    def __init__(self, spelling):
        super().__init__()
        self.spelling, self.weight = spelling, nn.Parameter(torch.randn(4, 4, 6, dtype=torch.complex64) * 0.2)

    def forward(self, x):
        modes = torch.fft.rfft(x)[..., :6]
        if self.spelling == "einsum":
            mixed = torch.einsum("bim,iom->bom", modes, self.weight)
        elif self.spelling == "matmul":
            mixed = (modes.permute(2, 0, 1) @ self.weight.permute(2, 0, 1)).permute(1, 2, 0)
        else:
            mixed = (modes[:, :, None] * self.weight).sum(1)
        spectrum = torch.zeros(x.shape[0], 4, 17, dtype=torch.complex64)
        spectrum[..., :6] = mixed
        return torch.fft.irfft(spectrum, n=32)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("spelling", ["einsum", "matmul", "product"])
def test_a_fourier_neural_operator(spelling, tmp_path):
    torch.manual_seed(0)
    x, others = torch.randn(8, 2, 32), torch.randn(3, 2, 32)
    model = nn.Sequential(nn.Conv1d(2, 4, 1), Spectral(spelling), nn.GELU(), nn.Conv1d(4, 2, 1)).eval()
    sim = qtk.QuantSim(model, x, config="onnxruntime")
    name = {"product": "1.mul:out"}.get(spelling, f"1.{spelling}:out")
    assert "complex numbers" in {site.name: why for site, why in sim.plan.unquantized.items()}[name]
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=("onnx", "pt2e"), progress=False)
    scale = sim.encodings()["3:out"].scale
    for given in (x, others):
        (found,) = run_onnx(tmp_path / "out" / "model.onnx", given)
        with torch.no_grad():  # slice_scatter of complex numbers has no gradient
            expected = sim.model(given)
        assert (torch.from_numpy(found) - expected).abs().max() < 1.01 * scale


class OfPairs(nn.Module):
    """A linear layer on pairs of real numbers, complex where ``where`` says."""

    def __init__(self, where):
        super().__init__()
        self.where, self.fc = where, nn.Linear(2, 2)
        self.register_buffer("total", torch.zeros(4, 3, dtype=torch.complex64))

    def forward(self, x, gain):
        y = torch.view_as_complex(self.fc(torch.view_as_real(x) if x.is_complex() else x)) * gain.sum()
        if self.where == "state":
            self.total += y
        return {"y": y if self.where == "output" else torch.view_as_real(y)}


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize(("where", "text"), [
    ("input", r"^the input x is complex, .*view_as_real\(x\) and call torch\.view_as_complex"),
    ("output", r"^the output y is complex, .*return torch\.view_as_real\(y\), or export formats=\('pt2e',\)"),
    ("state", r"^the state total is complex, .*in the buffer"), ("nowhere", ""),
])
def test_complex_numbers_stay_inside_of_a_file(where, text, tmp_path):
    x = torch.randn(4, 3, dtype=torch.complex64)
    inputs = x if where == "input" else torch.view_as_real(x), torch.ones(2)
    sim = qtk.QuantSim(OfPairs(where), inputs, dynamic_shapes=None, weight_bits=None, activation_bits=None)
    if where == "nowhere":
        sim.export(tmp_path / "out", formats=("onnx",), progress=False)
        (found,) = run_onnx(tmp_path / "out" / "model.onnx", *inputs)
        torch.testing.assert_close(torch.from_numpy(found), sim.model(*inputs)["y"])
        return
    with pytest.raises(ExportError, match=text):
        sim.export(tmp_path / "out", formats=("onnx",), progress=False)
    assert not (tmp_path / "out").exists()
    sim.export(tmp_path / "out", formats=("pt2e",), progress=False)
