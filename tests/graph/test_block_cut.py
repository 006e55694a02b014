"""Where the cut goes: arguments, results, quantizers and parameters on its edges, sizes, and what cannot be cut."""

import pytest
import torch
from torch import fx, nn

import qtk
from qtk.errors import CaptureError
from qtk.graph.block_cut import ROOT, cut


def calling(block, index, *args):
    raise AssertionError("is only written into the graph")


def cut_at(model, *paths):
    """The outer graph, and path → graphs of the calls."""
    blocks = {model.get_submodule(path): path for path in paths}
    codes = {block: [] for block in blocks}
    outer = cut(model, blocks, codes, calling)
    return outer, {blocks[block]: graphs for block, graphs in codes.items()}


def targets(graph: fx.Graph):
    return [str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")]


def results(code):
    (values,) = code.graph.output_node().args
    return [str(value) for value in (values if isinstance(values, tuple) else (values,))]


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, mask, x, table, skip):
        kept = x.masked_fill(mask, 0.0)
        gate = torch.sigmoid(self.gate(kept))
        return self.fc(kept + table) * gate + skip, gate, mask.logical_not()


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixing, self.table, self.head = Mixing(), nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x, mask):
        y, gate, rest = self.mixing(mask, torch.relu(x), self.table, x)
        return self.head(y) * gate, rest


@pytest.mark.medium
def test_what_enters_and_leaves_is_in_the_order_of_its_use():
    x, mask = torch.randn(3, 4), torch.rand(3, 4) > 0.5
    sim = qtk.QuantSim(Around().eval(), (x, mask))
    outer, codes = cut_at(sim.model, "mixing")
    (code,) = codes["mixing"]
    arguments = [node.target for node in code.graph.find_nodes(op="placeholder")]
    assert arguments == ["qtk_quantizers_relu_out", "qtk_quantizers_x_input", "mask", "qtk_quantizers_table"]
    assert results(code) == ["qtk_quantizers_mixing_add_1_out", "qtk_quantizers_mixing_sigmoid_out", "logical_not"]
    assert "fc.weight" in targets(code.graph)
    assert f"{ROOT}.qtk_quantizers.mixing.fc.weight" in targets(code.graph)
    assert not [target for target in targets(outer) if "fc" in target]
    assert "table" in targets(outer)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        y = self.a(x)
        return self.b(y) + self.c(y)


def test_a_quantizer_goes_with_its_value_or_on_an_edge_with_its_reader():
    config = {"version": 1, "rules": [{"match": {"path": "b"}, "input": {"bits": 4}}]}
    sim = qtk.QuantSim(Pair().eval(), torch.randn(3, 4), config=config)
    assert {"a:out", "b:in[0]"} <= set(sim.quantizers)
    outer, codes = cut_at(sim.model, "a", "b", "c")
    held = {path: targets(graphs[0].graph) for path, graphs in codes.items()}
    assert f"{ROOT}.qtk_quantizers.a:out" in held["a"]
    assert f"{ROOT}.qtk_quantizers.b:in[0]" in held["b"]
    assert not {target for target in targets(outer) if "a:out" in target or "in[" in target}
    assert results(codes["a"][0]) == ["qtk_quantizers_a_out"]
    x = torch.randn(8, 4)
    sim.compute_encodings([x], progress=False)
    assert torch.equal(qtk.block_view(sim, ["a", "b", "c"])(x), sim.model(x))


class Sized(nn.Module):
    """Reshapes by a size that the block computes."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv1d(2, 4, 3), nn.Linear(4, 4)

    def forward(self, x):
        y = self.conv(x)
        return self.fc(y.transpose(1, 2).reshape(y.shape[0] * y.shape[2], 4)).reshape(y.shape[0], y.shape[2], 4)


@pytest.mark.medium
def test_sizes_of_values_inside_a_block_are_of_the_block():
    model = nn.Sequential(nn.ReLU(), Sized(), nn.ReLU(), Sized())
    model[3].conv = nn.Conv1d(7, 4, 2)
    model.eval()
    x = torch.randn(3, 2, 9)
    with torch.no_grad():
        model(x)
    prepared = qtk.prepare_model(model[:3], x, dynamic_shapes="all")
    _, codes = cut_at(prepared, "1")
    assert len(codes["1"][0].graph.find_nodes(op="placeholder")) == 1
    view = qtk.block_view(prepared, "1", checkpoint=True)
    for shape in ((3, 2, 9), (5, 2, 17)):
        assert torch.equal(view(torch.ones(shape)), model[:3](torch.ones(shape)))


def test_an_op_of_no_module_between_ops_of_a_block_is_of_the_block():
    """As what a rewrite inserts, or a size that capture shares."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), nn.ReLU()).eval()
    x = torch.ones(2, 4)
    prepared = qtk.prepare_model(model, x)
    (inner, last) = prepared.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    inner.meta = {key: value for key, value in inner.meta.items() if key != "nn_module_stack"}
    outer, codes = cut_at(prepared, "0")
    assert str(inner) in map(str, codes["0"][0].graph.nodes)
    assert str(inner) not in map(str, outer.nodes)
    assert str(last) in map(str, outer.nodes)
    assert torch.equal(qtk.block_view(prepared, "0")(x), model(x))


class Tied(nn.Module):
    """Reads a weight inside the block that holds it, and behind it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.inner(x) @ self.inner.weight


def test_a_parameter_that_others_read_too_enters_as_an_argument():
    x = torch.randn(3, 4)
    sim = qtk.QuantSim(Tied().eval(), x)
    sim.compute_encodings([x], progress=False)
    outer, codes = cut_at(sim.model, "inner")
    assert "inner.weight" in targets(outer)
    assert "inner.weight" not in targets(codes["inner"][0].graph)
    view = qtk.block_view(sim, "inner")
    gradients = []
    for model in (sim.model, view):
        sim.model.zero_grad()
        model(x).square().sum().backward()
        gradients.append(sim.model.get_submodule("inner").weight.grad.clone())
    assert torch.equal(*gradients)


class Braided(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.two = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def forward(self, x):
        return self.one["b"](self.two["a"](x)) + self.two["b"](self.one["a"](x))


@pytest.mark.medium
def test_two_blocks_that_each_wait_for_the_other():
    sim = qtk.QuantSim(Braided().eval(), torch.randn(3, 4))
    for paths in (("one",), ("two",)):
        cut_at(sim.model, *paths)
    with pytest.raises(CaptureError, match=r"cut at 'one' is not convex: one.\w:out leaves it, and what two makes"):
        cut_at(sim.model, "one", "two")
