"""Both paths of a graph against running the model with quantizers on and off."""

import pytest
import torch
from torch import nn

import qtk
from qtk.layerwise.path_evaluator import PathEvaluator
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.recurrent, self.last = nn.Linear(4, 4), nn.GRU(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x):
        return self.last(self.recurrent(torch.relu(self.first(x)))[0])


def simulation():
    torch.manual_seed(0)
    x = torch.randn(3, 6, 4)
    sim = qtk.QuantSim(Net().eval(), x, weight_bits=4)
    sim.compute_encodings([x], progress=False)
    return sim, x


@torch.no_grad()
def both(sim, x):
    with in_mode(sim.quantizers.values(), Mode.BYPASS):
        float_output = sim.model(x)
    return float_output, sim.model(x)


@torch.no_grad()
def run(evaluator, graph, x):
    """The values of the output on every path."""
    nodes = list(graph.graph.nodes)
    values = {node: (x,) * len(evaluator.quantized) for node in nodes if node.op == "placeholder"}
    for node in nodes:
        evaluator.run(node, values)
    return values[nodes[-1].all_input_nodes[0]], values


@pytest.mark.medium
def test_each_path_is_what_the_model_computes():
    sim, x = simulation()
    outputs, _ = run(PathEvaluator(sim.model, (False, True)), sim.model, x)
    for output, expected in zip(outputs, both(sim, x), strict=True):
        assert torch.equal(output, expected)
    assert not torch.equal(*outputs)
    assert all(quantizer.mode is Mode.SIMULATE for quantizer in sim.quantizers.values())
    for path, quantized in enumerate((False, True)):
        assert torch.equal(run(PathEvaluator(sim.model, (quantized,)), sim.model, x)[0][0], outputs[path])


def test_a_node_runs_once_where_both_paths_read_the_same():
    x = torch.randn(3, 4)
    sim = qtk.QuantSim(nn.Sequential(nn.ReLU(), nn.Linear(4, 2)).eval(), x, weight_bits=4, activation_bits=None)
    sim.compute_encodings(None, progress=False)
    _, values = run(PathEvaluator(sim.model, (False, True)), sim.model, x)
    relu, linear = (node for node in values if node.op == "call_function")
    assert values[relu][0] is values[relu][1]
    assert not torch.equal(*values[linear])


@pytest.mark.medium
def test_the_float_path_keeps_the_parameters_it_had():
    sim, x = simulation()
    before, _ = both(sim, x)
    evaluator = PathEvaluator(sim.model, (False, True))
    weight = sim.model.get_parameter("first.weight")
    evaluator.keep_float((weight, None))
    with torch.no_grad():
        weight.mul_(0.5)
    outputs, _ = run(evaluator, sim.model, x)
    assert torch.equal(outputs[0], before)
    assert torch.equal(outputs[1], both(sim, x)[1])
    evaluator.drop_float(len(list(sim.model.graph.nodes)))
    outputs, _ = run(evaluator, sim.model, x)
    assert torch.equal(outputs[0], both(sim, x)[0])
    assert not torch.equal(outputs[0], before)


class Routed(nn.Module):
    """Experts chosen by scores so close to one another that quantization changes their order."""

    def __init__(self):
        super().__init__()
        self.first, self.experts = nn.Linear(4, 8), nn.Parameter(torch.randn(8, 5, 8))

    def forward(self, x):
        h = self.first(x)
        share, chosen = h.topk(1, dim=-1)
        return (self.experts[chosen[:, 0]] @ h[..., None])[..., 0] * share


@pytest.mark.medium
def test_a_router_decides_on_both_paths_as_in_float():
    torch.manual_seed(0)
    x = torch.randn(256, 4)
    sim = qtk.QuantSim(Routed().eval(), x, weight_bits=2, activation_bits=None)
    sim.compute_encodings([x], progress=False)
    _, values = run(PathEvaluator(sim.model, (False, True)), sim.model, x)
    (topk,) = (node for node in values if node.target is torch.ops.aten.topk.default)
    (float_share, float_chosen), (share, chosen) = values[topk]
    assert chosen is float_chosen
    h, quantized = values[topk.args[0]]
    assert not torch.equal(h.argmax(-1), quantized.argmax(-1))  # it would have decided otherwise
    assert torch.equal(share, quantized.gather(1, chosen))
    assert torch.equal(float_share, h.amax(-1, keepdim=True))


def test_parameters_of_a_stretch_are_those_it_alone_reads_in_float():
    sim, _ = simulation()
    paths, nodes = PathEvaluator(sim.model, (False, True)), list(sim.model.graph.nodes)
    names = {id(parameter): name for name, parameter in sim.model.named_parameters()}
    found = [names[id(each)] for each in paths.float_parameters(0, len(nodes))]
    assert sorted(found) == ["first.bias", "last.bias", "recurrent.bias_hh_l0", "recurrent.bias_ih_l0"]
    first = next(index for index, node in enumerate(nodes) if "relu" in str(node.target))
    assert [names[id(each)] for each in paths.float_parameters(0, first)] == ["first.bias"]
