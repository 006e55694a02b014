import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qtk.graph.flow import Flow
from qtk.graph.sites import is_float, value_site
from qtk.workflow.prepare import prepare_model


def flow_of(model, *inputs):
    prepared = prepare_model(model.eval(), inputs)
    by_name = {}
    for node in prepared.graph.nodes:
        if is_float(node):
            by_name.setdefault(value_site(node).name, node)
    return Flow(prepared.graph), by_name


@pytest.mark.medium
def test_roots_look_through_movement():
    class Net(nn.Module):
        def forward(self, x):
            y = torch.tanh(x)
            return y.transpose(0, 1).reshape(-1).chunk(2)[1] * 2

    flow, by_name = flow_of(Net(), torch.randn(4, 4))
    mul = by_name["mul:out"]
    assert value_site(flow.root(mul.args[0])).name == "tanh:out"
    assert [port.user for port in flow.readers(by_name["tanh:out"])] == [mul]


def test_static_values_hang_on_parameters_alone():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return F.linear(x, torch.tanh(self.w)) + x.sum()

    flow, by_name = flow_of(Net(), torch.randn(2, 4))
    assert flow.is_static(by_name["tanh:out"])
    assert not flow.is_static(by_name["sum:out"])


@pytest.mark.medium
def test_a_where_with_one_data_operand_only_moves():
    class Net(nn.Module):
        def forward(self, x, mask):
            y = torch.tanh(x)
            return torch.softmax(torch.where(mask, y, torch.tensor(float("-inf"))), -1)

    flow, by_name = flow_of(Net(), torch.randn(2, 4), torch.tensor([[True, False, True, True]]).expand(2, 4))
    (port,) = flow.data_ports(by_name["softmax:out"])
    assert value_site(flow.root(port.value)).name == "tanh:out"


def test_a_merge_is_a_number_only_if_all_that_it_merges_are():
    class Net(nn.Module):
        def forward(self, x, mask):
            y = torch.tanh(x)
            bias = torch.where(mask, torch.zeros(2, 4), torch.full((2, 4), -100.0))
            return torch.cat([torch.zeros(2, 1), y, x.sigmoid()], 1), bias + y

    flow, by_name = flow_of(Net(), torch.randn(2, 4), torch.ones(2, 4, dtype=torch.bool))
    assert not flow.is_constant(by_name["concat:out"])
    assert flow.is_constant(by_name["where:out"])
    assert [value_site(flow.root(port.value)).name for port in flow.data_ports(by_name["add:out"])] == ["tanh:out"]
