import pytest
import torch
from torch import nn

import qtk
from qtk.graph.dynamic_steps import dynamic_steps


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.cell = nn.LSTM(4, 6, bidirectional=True), nn.LSTMCell(12, 6)

    def forward(self, x):
        return self.cell(self.both(x)[0][-1])


@pytest.mark.medium
@pytest.mark.parametrize(("rules", "paths"), [
    ([], ["both.l0", "both.l0_reverse", "cell.step"]),
    ([{"match": {"path": "both.l0"}, "inside": "float"}], ["both.l0_reverse", "cell.step"]),
    ([{"match": {"op": "lstm"}, "inside": "int16_state"}], []),
])
def test_layers_whose_products_alone_are_quantized(rules, paths):
    config = {"version": 1, "extends": "onnxruntime", "rules": rules}
    sim = qtk.QuantSim(Net().eval(), torch.randn(3, 2, 4), config=config)
    found = dynamic_steps(sim.simulation)
    assert list(found) == paths
    assert all([site.name for site in sites] == [f"{path}.projection:in[0]", f"{path}.cell.hidden_projection:in[0]"]
               for path, sites in found.items())
