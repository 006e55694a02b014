import pytest
import torch
from torch import nn

import qtk
from qtk.graph.flow import Flow
from qtk.graph.sites import value_site
from qtk.graph.value_kinds import ValueKind, is_clock, value_kinds
from qtk.graph.written_buffers import buffer_values, is_state, write_buffers, written_buffers
from qtk.workflow.prepare import prepare_model


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("past", torch.zeros(1, 2))
        self.register_buffer("weight", torch.ones(2))
        self.register_buffer("phase", torch.zeros(()))

    def forward(self, x):
        y = torch.cat([self.past, x])
        self.past.copy_(y[-1:])
        self.phase += 0.1
        return y * self.weight + self.phase.cos()


@pytest.mark.medium
def test_buffers_that_forward_writes_are_data_and_others_are_not():
    model = prepare_model(Stream().eval(), torch.randn(3, 2))
    buffers, flow = written_buffers(model.graph), Flow(model.graph)
    assert list(buffers) == ["past", "phase"]
    assert all(map(is_state, (buffer.read for buffer in buffers.values())))
    assert value_site(buffers["past"].read).name == "past:input"
    assert not flow.is_static(buffers["past"].read)
    weight = next(node for node in model.graph.find_nodes(op="get_attr") if node.target == "weight")
    assert not is_state(weight)
    assert flow.is_static(weight)
    assert value_site(weight).name == "weight"


def test_what_depends_on_itself_alone_counts():
    model = prepare_model(Stream().eval(), torch.randn(3, 2))
    past, phase = (buffer.read for buffer in written_buffers(model.graph).values())
    assert (is_clock(past), is_clock(phase)) == (False, True)
    assert value_kinds(model.graph, Flow(model.graph))[phase] is ValueKind.COUNT
    plan = qtk.QuantSim(model, torch.randn(3, 2)).plan
    assert "phase:input" not in {site.name for site in plan}


def test_values_are_copies_and_go_back_by_name():
    model = prepare_model(Stream().eval(), torch.randn(3, 2))
    before = buffer_values(model)
    model(torch.ones(3, 2))
    assert float(before["past"].sum()) == 0
    assert float(model.past.sum()) == 2
    write_buffers(model, before)
    assert float(model.past.sum()) == 0
