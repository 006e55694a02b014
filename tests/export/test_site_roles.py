"""Roles of quantized parameters, against what the checker reads of the ONNX file of the same simulation."""

import pytest
import torch
from torch import nn

import qtk
from qtk.export.onnx.file_contents import read_contents
from qtk.export.plan_json import plan_from_json, plan_to_json
from qtk.export.site_roles import parameter_roles
from tests.zoo.prepared import simulated


class Each(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.conv, self.shift = nn.Embedding(8, 6), nn.Conv1d(4, 6, 1), nn.Parameter(torch.randn(6))

    def forward(self, ids):
        return self.conv(self.table(ids) + self.shift) * 2


@pytest.mark.medium
def test_weights_biases_and_constants(tmp_path):
    ids = torch.randint(8, (2, 4))
    sim = qtk.QuantSim(Each().eval(), ids, config="qnn_htp")
    sim.compute_encodings([ids], progress=False)
    roles = parameter_roles(sim.simulation)
    assert roles == {"table.weight": "weights", "shift": "constants", "conv.weight": "weights", "conv.bias": "biases"}
    sim.export(tmp_path / "out", formats="onnx")
    assert {each.name: each.role for each in read_contents(tmp_path / "out" / "model.onnx").tensors
            if each.role != "activations"} == roles


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = nn.Linear(32, 8)

    def forward(self, x):
        return (self.k(x) @ self.k(x).mT).softmax(-1) @ self.k(x)


@pytest.mark.medium
def test_keys_and_values_are_caches_of_which_no_rule_of_a_target_speaks(tmp_path):
    x = torch.randn(2, 5, 32)
    sim = qtk.QuantSim(Attention().eval(), x, config={
        "version": 1, "extends": "weight_only_int4", "kv_cache": {"dtype": "fp8_e4m3"}})
    sim.compute_encodings([x], progress=False)
    caches = {site.name for site in sim.plan if site.port}
    assert caches
    assert parameter_roles(sim.simulation) == {"k.weight": "weights", **dict.fromkeys(caches, "caches")}
    assert plan_from_json(plan_to_json(sim.plan)) == sim.plan
    sim.export(tmp_path / "out", formats="encodings_json")
    (found,) = qtk.check_target(tmp_path / "out")
    assert found.violations == ()


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["residual", "tied", "language_model"])
def test_they_are_those_of_the_onnx_file(name, tmp_path):
    sim = simulated(name, config="qnn_htp")
    sim.export(tmp_path / "out", formats="onnx")
    read = {each.name: each.role for each in read_contents(tmp_path / "out" / "model.onnx").tensors}
    roles = parameter_roles(sim.simulation)
    assert roles
    assert {site: read.get(site, role) for site, role in roles.items()} == roles
