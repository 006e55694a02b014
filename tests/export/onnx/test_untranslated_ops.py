"""The error of an export that meets operators without ONNX operators."""

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        y = self.fc(x)
        return torch.erfinv(y.tanh()) + torch.linalg.solve(y @ y.mT + torch.eye(6), y)


@pytest.mark.medium
def test_an_error_names_operators_modules_and_a_format_that_works(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 6, 6)
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(6, 6), Unknown()).eval(), x)
    sim.compute_encodings([x], progress=False)
    with pytest.raises(ExportError) as raised:
        sim.export(tmp_path / "out", formats=("onnx",), progress=False)
    text = str(raised.value)
    assert text.startswith("torch cannot express the model in ONNX: no ONNX operators for aten.erfinv.default "
                           "(1.erfinv:out, in module 1, which is made of prims.erf_inv.default); aten.linalg_solve")
    assert "write this with operators that ONNX has" in text
    assert not (tmp_path / "out").exists()
    sim.export(tmp_path / "out", formats=("pt2e",), progress=False)
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    torch.testing.assert_close(program(x), sim.model(x), rtol=1e-3, atol=1e-3)
