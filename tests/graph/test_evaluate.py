import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.graph.evaluate import evaluate, evaluate_node, static_values
from qtk.graph.insert import quantizer_nodes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(F.relu(self.fc(x))) + x


@pytest.fixture(scope="module")
def sim():
    torch.manual_seed(0)
    live = {"version": 1, "extends": "default", "fold_batch_norms": False}
    sim = qtk.QuantSim(Net().eval(), torch.randn(8, 4), config=live)
    sim.compute_encodings([torch.randn(8, 4)], progress=False)
    return sim


def result(graph):
    (node,) = graph.output_node().all_input_nodes
    return node


def inputs(graph, x):
    return dict.fromkeys(graph.find_nodes(op="placeholder"), x)


@pytest.mark.medium
def test_a_graph_is_evaluated_as_the_model_computes_it(sim):
    x = torch.randn(8, 4)
    graph, values = sim.model.graph, inputs(sim.model.graph, x)
    assert torch.equal(evaluate(result(graph), values), sim.model(x))
    assert set(values) == {node for node in graph.nodes if node.op != "output"}


def test_bypassed_quantizers_return_their_input(sim):
    x = torch.randn(8, 4)
    graph = sim.model.graph
    values = inputs(graph, x)
    y = evaluate(result(graph), values, bypass_quantizers=True)
    for node in quantizer_nodes(sim.model):
        assert values[node] is values[node.args[0]]
    with torch.no_grad():
        fc, norm = sim.model.fc, sim.model.norm
        linear = F.relu(F.linear(x, fc.weight, fc.bias))
        expected = F.batch_norm(linear, norm.running_mean, norm.running_var, norm.weight, norm.bias) + x
    assert torch.allclose(y, expected, atol=1e-6)
    assert not torch.equal(y, sim.model(x))


def test_known_values_are_not_computed_again(sim):
    graph = sim.model.graph
    (relu,) = [node for node in graph.nodes if node.target is torch.ops.aten.relu.default]
    x = torch.randn(8, 4)
    values = {**inputs(graph, x), relu: torch.zeros(8, 4)}
    evaluate(result(graph), values)
    (fc,) = [node for node in graph.nodes if node.target is torch.ops.aten.linear.default]
    assert fc not in values
    assert not values[relu].any()


@pytest.mark.medium
def test_a_deep_graph_is_no_deep_recursion():
    class Deep(nn.Module):
        def forward(self, x):
            for _ in range(3000):
                x = x + 1
            return x

    graph = torch.fx.symbolic_trace(Deep()).graph
    x = torch.zeros(1)
    assert evaluate(result(graph), inputs(graph, x)) == 3000


def test_one_node_reads_through_the_callback_and_keyword_arguments_too():
    class Keyword(nn.Module):
        def forward(self, x):
            return torch.softmax(input=x, dim=0)

    module = torch.fx.symbolic_trace(Keyword())
    x = torch.randn(3)
    assert torch.equal(evaluate_node(result(module.graph), lambda read: x), torch.softmax(x, 0))


def test_inputs_and_outputs_are_not_evaluated():
    module = torch.fx.symbolic_trace(nn.ReLU())
    with pytest.raises(AssertionError, match="input or the output"):
        evaluate(result(module.graph), {})


class Standardized(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        w = self.weight
        return F.linear(x, (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True)) + self.shift


def test_static_sites_are_computed_as_the_model_computes_them_without_inputs():
    net = Standardized().eval()
    sim = qtk.QuantSim(net, torch.randn(2, 4))
    sites = [site for site, decided in sim.plan.items() if decided.static]
    values = {site.name: value for site, value in static_values(sim.model, sites)}
    w = net.weight.detach()
    assert set(values) == {"div:out", "shift"}
    assert torch.equal(values["div:out"], (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True))
    assert torch.equal(values["shift"], net.shift)
    assert not values["div:out"].requires_grad


def test_a_second_quantizer_on_an_edge_sees_the_float_parameter():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return F.linear(F.linear(x, self.weight), self.weight.t())

    config = {"version": 1, "defaults": {"weight": {"granularity": "per_channel"}}}
    net = Shared().eval()
    sim = qtk.QuantSim(net, torch.randn(2, 4), config=config, weight_bits=4)
    edges = [site for site, decided in sim.plan.items() if site.port.startswith("in[")]
    assert len(edges) == 2  # read along axis 0 by one op and along axis 1 by the other
    values = [value for _, value in static_values(sim.model, edges)]
    assert torch.equal(values[0], net.weight)
    assert torch.equal(values[1], net.weight.t())
