"""The value that layers read, before its quantizers."""

import pytest
import torch
from torch import nn

import qtk
from qtk.graph.float_root import float_root
from qtk.graph.flow import Flow


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        hidden = x.relu()
        return self.a(hidden) + self.b(hidden.reshape(2, -1, 8)).reshape(hidden.shape) + self.c(x)


@pytest.mark.medium
def test_layers_of_one_value_have_one_root():
    x = torch.randn(2, 3, 8)
    config = {"version": 1, "rules": [{"match": {"op": "linear"}, "input": {"bits": 8}},
                                      {"match": {"path": "b"}, "input": {"bits": 4}}]}
    graph = qtk.QuantSim(Three().eval(), x, config=config).model
    flow = Flow(graph.graph)
    roots = [float_root(flow, node.args[0]) for node in graph.graph.nodes
             if (row := flow.row(node)) is not None and row.kind == "linear"]
    assert len(roots) == 3
    assert roots[0] is roots[1]
    assert roots[2].op == "placeholder"
