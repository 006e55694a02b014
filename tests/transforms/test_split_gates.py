"""SiLU and hardswish of images become a gate and a product: the same function, one site more."""

import pytest
import torch
from torch import nn

import qtk
from qtk.transforms.split_gates import split_gates

X = 3 * torch.randn(2, 3, 8, 8)
CONFIG = {"version": 1, "split_gates": True}


def net(activation):
    return nn.Sequential(nn.Conv2d(3, 4, 3), activation, nn.Conv2d(4, 4, 1)).eval()


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Hardswish])
def test_the_function_stays(activation):
    model = net(activation())
    prepared = qtk.prepare_model(model, X)
    split_gates(prepared)
    torch.testing.assert_close(prepared(X), model(X), rtol=1e-5, atol=1e-6)
    targets = [str(node.target) for node in prepared.graph.nodes]
    assert "aten.mul.Tensor" in targets
    assert not {"aten.silu.default", "aten.hardswish.default"} & set(targets)


@pytest.mark.medium
@pytest.mark.parametrize("activation", [nn.SiLU, nn.Hardswish])
def test_gate_and_product_have_sites(activation):
    sites = {site.name for site in qtk.QuantSim(net(activation()), X, config=CONFIG).plan}
    assert {"0:out", "1.gate:out", "1:out"} <= sites
    assert "1.gate:out" not in {site.name for site in qtk.QuantSim(net(activation()), X).plan}


def test_activations_of_linear_layers_stay_whole():
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU()).eval()
    assert "1.gate:out" not in {site.name for site in qtk.QuantSim(model, X, config=CONFIG).plan}
