"""The ops of sites stand where lowerings look for them; that the numbers stay is in test_pt2e."""

import operator

import pytest
import torch
from torch import fx, nn

import qtk
from qtk.export.repeated_ops import dequantize_for_each_reader, is_dequantize, repeat_behind_movement
from qtk.torch_private import load_decomposed_ops
from tests.zoo.prepared import simulated, slow_but

aten = torch.ops.aten
WEIGHTED = (aten.linear.default, aten.conv2d.default)
MOVES = (aten.transpose.int, aten.view.default, aten.reshape.default, aten.flip.default, aten.unbind.int,
         operator.getitem)


def program_of(sim, folder):
    sim.export(folder, formats="pt2e")
    return torch.export.load(folder / "model.pt2")


def layers(program):
    found = [node for node in program.graph.nodes if node.target in WEIGHTED]
    assert found
    return found


def source_of(value):
    while value.target in MOVES:
        value = value.args[0]
    return value


class Moved(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x):
        return self.second(self.first(x).transpose(1, 2).reshape(x.shape[0], -1, 12))


class Unbound(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        left, right = self.first(x).unbind(1)
        return self.second(left) + self.second(right.flip(-1)) * left.sum()


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.GRU(8, 8, batch_first=True)

    def forward(self, x):
        return self.net(x)[0]


MODELS = {"reshaped": (Moved, (3, 5, 8)), "unbound": (Unbound, (3, 2, 8)), "in a recurrent net": (TimeFirst, (3, 2, 8))}


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_ops_stand_right_before_what_computes_with_moved_elements(name, tmp_path):
    build, shape = MODELS[name]
    x = torch.randn(shape)
    sim = qtk.QuantSim(build().eval(), x)
    sim.compute_encodings([x], progress=False)
    program = program_of(sim, tmp_path / "export")
    for layer in layers(program):
        assert is_dequantize(layer.args[1])
        assert is_dequantize(layer.args[0]) or not is_dequantize(source_of(layer.args[0])), layer.format_node()
    assert is_dequantize(layer.args[0])
    with torch.no_grad():
        step = sim.quantizers[next(site for site in reversed(list(sim.quantizers)) if ":out" in site)].encoding.scale
        assert (program.module()(x) - sim.model(x)).abs().max() <= 1.01 * step


@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(("residual", "vit", "gru"), "residual"))
def test_each_reader_of_codes_has_its_own_op(name, tmp_path):
    program = program_of(simulated(name), tmp_path / "export")
    dequantized = [node for node in program.graph.nodes if is_dequantize(node)]
    assert dequantized
    assert all(len(node.users) == 1 for node in dequantized)
    shared = [node.args[0] for node in dequantized]
    assert len(set(shared)) < len(shared)


def test_an_output_keeps_its_name_and_what_moves_nothing_is_left_alone():
    load_decomposed_ops()
    ops, graph = torch.ops.quantized_decomposed, fx.Graph()
    x = graph.placeholder("x")
    codes = graph.call_function(ops.quantize_per_tensor.default, (x, 0.1, 0, -128, 127, torch.int8))
    real = graph.call_function(ops.dequantize_per_tensor.default, (codes, 0.1, 0, -128, 127, torch.int8))
    for node in (x, codes, real):
        node.meta["val"] = torch.empty(3)
    first, second = (graph.call_function(torch.ops.aten.relu.default, (real,)) for _ in range(2))
    result = graph.output((first, second, real))
    repeat_behind_movement(graph)
    dequantize_for_each_reader(graph)
    graph.lint()
    assert result.args[0][2] is real
    assert len({first.args[0], second.args[0], real}) == 3
    assert {node.args[0] for node in (first.args[0], second.args[0], real)} == {codes}
