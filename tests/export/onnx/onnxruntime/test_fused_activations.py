"""GELU and SiLU in ONNX Runtime's optimized graph: one operator each, with the values of the simulation."""

import pytest
import torch
from torch import nn

from tests.export.onnx.onnxruntime.test_flat_linears import Mlp, exported, optimized_kinds, steps
from tests.exported_files import leave_out


class Convolutions(nn.Module):
    """The activation reads codes: a convolution on integers has a quantizer behind it."""

    def __init__(self, activation):
        super().__init__()
        self.up, self.activation, self.down = nn.Conv2d(3, 8, 3), activation, nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


class Moved(Convolutions):
    def forward(self, x):
        return self.activation(self.up(x).flatten(2).transpose(1, 2))


class Pooled(Convolutions):
    def forward(self, x):
        return self.activation(nn.functional.max_pool2d(self.up(x), 2))


X = torch.randn(2, 3, 8, 8)
CONFIG = {"version": 1, "extends": "onnxruntime", "split_gates": False}
FUSED = {"gelu": (nn.GELU, "Gelu"), "silu": (nn.SiLU, "QuickGelu")}


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(FUSED))
@pytest.mark.parametrize("net", [Convolutions, Moved, Pooled])
def test_an_activation_of_codes_is_one_operator(net, name, tmp_path):
    make, kind = FUSED[name]
    sim = exported(net(make()), X, tmp_path / "out", config=CONFIG)
    kinds = optimized_kinds(tmp_path / "out")
    assert (kinds[kind], kinds["Erf"], kinds["Sigmoid"], kinds["Mul"]) == (1, 0, 0, 0)
    for optimized in (False, True):
        assert steps(sim, X, tmp_path / "out", optimized=optimized).max() < 1.01


@pytest.mark.medium
def test_gelu_of_floats_is_one_operator(tmp_path):
    x = torch.randn(2, 5, 16)
    sim = exported(Mlp(nn.GELU()), x, tmp_path / "out")
    kinds = optimized_kinds(tmp_path / "out")
    assert (kinds["Gelu"] + kinds["BiasGelu"], kinds["Erf"], kinds["Max"]) == (1, 0, 0)
    assert steps(sim, x, tmp_path / "out", optimized=False).max() < 1.01


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", list(FUSED))
def test_without_it_the_activation_is_several_operators(name, tmp_path, monkeypatch):
    leave_out(monkeypatch, "fuse_activations")
    make, kind = FUSED[name]
    exported(Convolutions(make()), X, tmp_path / "out", config=CONFIG)
    kinds = optimized_kinds(tmp_path / "out")
    assert kinds[kind] == 0
    assert kinds["Erf"] + kinds["Sigmoid"] == 1


@pytest.mark.medium
def test_a_value_with_other_readers_keeps_them(tmp_path):
    class Skipped(Convolutions):
        def forward(self, x):
            y = self.up(x)
            return self.down(self.activation(y)) + y.mean(1, keepdim=True)

    sim = exported(Skipped(nn.GELU()), X, tmp_path / "out", config=CONFIG)
    assert optimized_kinds(tmp_path / "out")["Gelu"] == 1
    assert steps(sim, X, tmp_path / "out", optimized=False).max() < 1.01
