"""Operators that torch's exporter does not know, against torch: written out, and in files."""

import functools

import pytest
import torch
from torch import nn

import qtk
from qtk.export.onnx import further_decompositions
from qtk.export.onnx.further_decompositions import FURTHER
from tests.export.onnx.simulated import run_onnx

torch.manual_seed(0)
X, Y, ROWS = torch.randn(3, 7, 5), torch.randn(3, 4, 5), torch.randn(2, 40, 5)
TIED = torch.randint(-2, 3, (4, 9)).float()
SIGNED = torch.tensor([-1.0, -0.0, 0.0, 2.0])
ATEN = torch.ops.aten

CALLS = {
    "cdist": [(ATEN._cdist_forward.default, (X, Y, p, mode)) for p in (0.0, 1.0, 2.0, 3.0, torch.inf) for mode in (
        None, 1, 2)] + [(ATEN._cdist_forward.default, (ROWS, ROWS + 1, 2.0, None))],
    "pdist": [(ATEN._pdist_forward.default, (Y[0], p)) for p in (1.0, 2.0, torch.inf)],
    "cumprod": [(ATEN.cumprod.default, (X, dim)) for dim in (0, 1, -1)] + [(ATEN.cumprod.default, (X[0, 0, :1], 0))],
    "cummax": [(ATEN.cummax.default, (each, dim)) for each in (TIED, TIED.long()) for dim in (0, -1)],
    "cummin": [(ATEN.cummin.default, (each, dim)) for each in (TIED, TIED.long()) for dim in (0, -1)],
    "kthvalue": [(ATEN.kthvalue.default, (X, 2, 1, keepdim)) for keepdim in (False, True)],
    "median": [(ATEN.median.dim, (X, dim, True)) for dim in (1, 2)] + [(ATEN.median.dim, (Y, 1))],
    "median_of_all": [(ATEN.median.default, (X,)), (ATEN.median.default, (Y,))],
    "searchsorted": [(functools.partial(ATEN.searchsorted.Tensor, right=right), (ordered, TIED)) for right in (
        False, True) for ordered in (TIED[0].sort()[0], TIED.sort()[0])],
    "hypot": [(ATEN.hypot.default, (X, X[0]))],
    "fmax": [(ATEN.fmax.default, (SIGNED, torch.tensor([torch.nan, 1.0, torch.nan, 1.0])))],
    "fmin": [(ATEN.fmin.default, (SIGNED, torch.tensor([torch.nan, 1.0, torch.nan, 1.0])))],
    "copysign": [(ATEN.copysign.Tensor, (X[0, 0, :1], SIGNED))],
    "signbit": [(ATEN.signbit.default, (SIGNED,)), (ATEN.signbit.default, (SIGNED.long(),))],
    "sort_stable": [(functools.partial(ATEN.sort.stable, stable=True), (X, 1, True))],
    "rrelu": [(ATEN.rrelu_with_noise_functional.default, (X, torch.ones_like(X)))],
}


def test_every_operator_is_called_here():
    assert {each.__name__ for each in FURTHER.values()} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_what_torch_computes(name):
    written = getattr(further_decompositions, name)
    for operator, args in CALLS[name]:
        options = operator.keywords if isinstance(operator, functools.partial) else {}
        if name == "sort_stable":
            args, options = args[:1], {**options, "dim": args[1], "descending": args[2]}
        expected = operator(*args) if name != "sort_stable" else ATEN.sort.stable(*args, **options)
        torch.testing.assert_close(written(*args, **options), expected, rtol=2e-5, atol=2e-5, equal_nan=True)


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes, self.fc = nn.Parameter(torch.randn(30, 6)), nn.Linear(6, 6)

    def forward(self, x):
        y = self.fc(x)
        return (torch.cdist(y, self.codes), torch.cummax(y, 1)[0], y.sigmoid().cumprod(-1), y.median(1)[0],
                torch.sort(y, dim=1, stable=True)[0], torch.copysign(y, x))


@pytest.mark.medium
def test_files_of_any_batch_compute_what_was_simulated(tmp_path):
    torch.manual_seed(0)
    x, others = torch.randn(4, 5, 6), torch.randn(7, 5, 6)
    sim = qtk.QuantSim(Several().eval(), x, config="onnxruntime")
    sim.compute_encodings([x, others], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",), progress=False)
    for given in (x, others):
        found = run_onnx(tmp_path / "out" / "model.onnx", given)
        for each, expected in zip(found, sim.model(given), strict=True):
            assert (torch.from_numpy(each) - expected).abs().max() <= 1e-3 * expected.abs().max()
