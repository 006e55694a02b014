"""Roles of quantized parameters, against what the checker reads of the ONNX file of the same simulation."""

import pytest
import torch
from torch import nn

import qtk
from qtk.export.onnx.file_contents import read_contents
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
