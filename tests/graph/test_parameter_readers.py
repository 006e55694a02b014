import torch
from torch import nn

import qtk
from qtk.graph.parameter_readers import memory_of, parameter_readers


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.shift = nn.Embedding(8, 4), nn.Linear(4, 8), nn.Parameter(torch.ones(4))
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids) + self.shift)


def test_each_reader_of_a_memory_is_found():
    eight = {"version": 1, "defaults": {"weight": {"bits": 4}},
             "rules": [{"match": {"path": "head"}, "weight": {"bits": 8}}]}
    sim = qtk.QuantSim(Tied().eval(), torch.tensor([[1, 2]]), config=eight)
    readers = parameter_readers(sim.model)
    of_weight = readers[memory_of(sim.model.get_parameter("embed.weight"))]
    assert of_weight < set(sim.quantizers.values())
    assert sorted(quantizer.spec.dtype.bits for quantizer in of_weight) == [4, 8]
    assert readers[memory_of(sim.model.get_parameter("head.bias"))] == {None}
