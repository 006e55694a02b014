import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import qtk
from qtk.graph.flow import Flow, ancestors, loss_nodes
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


X, LABELS, TARGET = torch.randn(6, 4), torch.randint(3, (6,)), torch.randn(6, 3)


class Model(nn.Module):
    def __init__(self, loss, *, returns=True):
        super().__init__()
        self.body, self.loss, self.returns = nn.Linear(4, 3), loss, returns

    def forward(self, x, target):
        y = self.body(x)
        loss = self.loss(y, target)
        return (loss, y) if self.returns else loss


def smooth(y, labels):
    return F.cross_entropy(y, labels, label_smoothing=0.1)


def by_hand(y, labels):
    return -y.log_softmax(-1).gather(1, labels[:, None]).mean()


def squared(y, target):
    return ((y - target) ** 2).sum(-1).sqrt().mean() * 0.5


@pytest.mark.medium
@pytest.mark.sample(4)
@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize(("loss", "target"), [
    (F.cross_entropy, LABELS), (smooth, LABELS), (by_hand, LABELS), (F.mse_loss, TARGET), (squared, TARGET),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_loss_and_its_target_stay_in_float(loss, target, returns):
    sim = qtk.QuantSim(Model(loss, returns=returns), (X, target))
    assert list(sim.quantizers) == ["x:input", "body.weight", "body:out"]
    sim.compute_encodings([(X, target)], progress=False)
    output = sim.model(X, target)
    if returns:
        assert torch.equal(output[0], loss(output[1], target))
    else:
        assert "of a loss" in sim.plan.unquantized.values()


class Scalar(nn.Module):
    """Returns a scalar that is no loss, for nothing is read by it alone."""

    def forward(self, x, y):
        return (x @ y).relu().sum()


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x, temperature):
        y = self.body(x) / temperature
        return y, y.mean()


@pytest.mark.medium
@pytest.mark.parametrize(("model", "inputs"), [
    (Scalar(), (X, torch.randn(4, 3))), (Temperature(), (X, torch.tensor(2.0))),
    (nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), (X[:1],)),
])
def test_what_is_no_loss(model, inputs):
    assert loss_nodes(qtk.prepare_model(model, inputs).graph) == set()


def test_ancestors_of_several_nodes_are_found_once():
    graph = fx.Graph()
    x, y, other = (graph.placeholder(name) for name in "xyz")
    total = graph.call_function(torch.add, (x, y))
    left, right = (graph.call_function(torch.neg, (total,)) for _ in range(2))
    assert ancestors([left, right]) == {x, y, total}
    assert ancestors([x]) == set()
    assert other not in ancestors([left])
