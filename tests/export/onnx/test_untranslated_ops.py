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


class ConvolvedByOthers(nn.Module):
    """A network that makes the kernels with which another input is convolved, sample by sample."""

    def __init__(self):
        super().__init__()
        self.kernels = nn.Linear(4, 8 * 9)

    def forward(self, x, c):
        samples = x.shape[0]
        kernels = self.kernels(c).reshape(samples * 8, 1, 3, 3)
        return nn.functional.conv2d(x.reshape(1, samples, 8, 8), kernels, groups=samples).view(samples, 8, 6, 6)


def test_a_setting_of_a_free_size_is_named_with_a_way_out(tmp_path):
    example = torch.randn(3, 1, 8, 8), torch.randn(3, 4)
    for shapes in ("batch", None):
        sim = qtk.QuantSim(ConvolvedByOthers().eval(), example, dynamic_shapes=shapes)
        sim.compute_encodings([example], progress=False)
        if shapes is None:
            sim.export(tmp_path / "out", formats=["onnx"])
        else:
            with pytest.raises(ExportError) as raised:
                sim.export(tmp_path / "out", formats=["onnx"])
            assert str(raised.value) == (
                "torch cannot express the model in ONNX: groups of aten.conv2d.default (conv2d:out, in the model) "
                "depends on a free size, which ONNX holds fixed; prepare the model with dynamic_shapes=None")


class PaddedByAQuarter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3))

    def forward(self, x):
        return nn.functional.conv1d(x, self.weight, padding=x.shape[-1] // 4)


@pytest.mark.medium
def test_padding_of_a_free_size_is_named(tmp_path):
    sim = qtk.QuantSim(PaddedByAQuarter(), torch.randn(2, 3, 12), dynamic_shapes="all", weight_bits=None,
                       activation_bits=None)
    with pytest.raises(ExportError, match=r"^torch cannot .*: padding of aten\.conv1d\.default .* depends .*=None$"):
        sim.export(tmp_path / "out", formats=("onnx",))


@pytest.mark.medium
def test_what_qtk_refuses_is_told_in_its_own_words(tmp_path):
    x = torch.randn(2, 3, 13, 13)
    sim = qtk.QuantSim(nn.AvgPool2d(2, ceil_mode=True, divisor_override=3), x, weight_bits=None, activation_bits=None)
    with pytest.raises(ExportError, match=r"^an average pool over \(2, 2\) with divisor_override=3 has windows"):
        sim.export(tmp_path / "out", formats=("onnx",))
