"""What is learned of a window acts on the quantized path alone, and starts as what is there."""

import pytest
import torch
from torch import nn

import qtk
from qtk.layerwise.blocks import find_windows
from qtk.layerwise.path_evaluator import PathEvaluator
from qtk.layerwise.weighted_layers import weighted_layers
from qtk.layerwise.window_variables import LearnedBias, WindowVariables


class Tied(nn.Module):
    """Three layers, the first two of which share a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.inner = nn.Linear(6, 6, bias=False)
        self.inner.bias = self.first.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x).relu()).relu())


def windows_of(model: nn.Module, length: int, x: torch.Tensor):
    sim = qtk.QuantSim(model.eval(), x, weight_bits=3, activation_bits=4)
    sim.compute_encodings([x], progress=False)
    paths = PathEvaluator(sim.model, (False, True))
    nodes = list(sim.model.graph.nodes)
    last_reads = {read: index for index, node in enumerate(nodes) for read in (node, *paths.reads(node))}
    layers = weighted_layers(sim.model, sim.simulation.plan)[0]
    return sim, paths, find_windows(nodes, paths, last_reads, layers, length)


def test_a_bias_is_learned_where_one_window_alone_reads_it():
    torch.manual_seed(0)
    sim, _, windows = windows_of(Tied(), 1, torch.randn(8, 6))
    biases = {name: each for name, each in sim.model.named_parameters() if name.endswith("bias")}
    assert [[name for name, bias in biases.items() if any(bias is each for each in window.biases)]
            for window in windows] == [[], [], ["last.bias"]]
    sim, _, (window,) = windows_of(Tied(), 3, torch.randn(8, 6))
    assert len(window.biases) == 2  # the tied one once


@torch.no_grad()
def test_they_act_on_the_quantized_path_while_they_are_learned():
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    sim, paths, (window,) = windows_of(Tied(), 3, x)
    before = {name: value.clone() for name, value in sim.model.state_dict().items()}
    nodes, wanted = list(sim.model.graph.nodes), sim.model(x)

    def outputs() -> list[torch.Tensor]:
        found = []
        for path in (0, 1):
            values = {node: (x, x) for node in nodes if node.op == "placeholder"}
            for node in nodes[:-1]:
                if not paths.is_parameter(node) and node.op != "placeholder":
                    values[node] = (paths.evaluate(node, values, path),) * 2
            found.append(values[nodes[-1].all_input_nodes[0]][0])
        return found

    variables = WindowVariables(window, {}, paths)
    assert len(variables.roundings) == 3
    assert len(variables.shifts) == 2
    float_output = outputs()[0]
    with variables.acting():
        torch.testing.assert_close(outputs()[1], wanted)
        variables.shifts[-1] += 0.5
        moved = outputs()
    assert torch.equal(moved[0], float_output)
    shift = variables.values()[1][-1] - window.biases[-1]
    torch.testing.assert_close(shift, torch.full_like(shift, 0.5 * float(window.biases[-1].abs().mean())))
    assert not torch.equal(moved[1], wanted)
    assert torch.equal(outputs()[1], wanted)
    assert all(torch.equal(value, sim.model.state_dict()[name]) for name, value in before.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_keeps_its_dtype_and_a_bias_of_zeros_stays(dtype):
    bias = torch.tensor([0.5, -1.5], dtype=dtype)
    learned = LearnedBias(bias)
    assert torch.equal(learned.value(), bias)
    assert learned.value().dtype is dtype
    learned.value().float().sum().backward()
    torch.testing.assert_close(learned.variable.grad, torch.ones(2))  # the mean magnitude
    zeros = LearnedBias(torch.zeros(2))
    zeros.value().sum().backward()
    assert not zeros.variable.grad.any()
