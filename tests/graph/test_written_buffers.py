import torch
from torch import nn

from qtk.graph.written_buffers import written_buffers
from qtk.workflow.prepare import prepare_model


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("past", torch.zeros(1, 2))
        self.register_buffer("weight", torch.ones(2))

    def forward(self, x):
        y = torch.cat([self.past, x])
        self.past.copy_(y[-1:])
        return y * self.weight


def test_buffers_that_forward_writes_are_named_and_others_are_not():
    graph = prepare_model(Stream().eval(), torch.randn(3, 2)).graph
    assert written_buffers(graph) == ["past"]
