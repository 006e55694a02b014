"""What is inside composites is captured like any model: sites with names, graphs of their own, a free batch."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from qtk.capture.open_composites import open_composites
from qtk.errors import CaptureError
from qtk.graph.graphs import graphs, nested_graphs
from qtk.graph.sites import COMPOSITE, label, value_site
from qtk.nn.tap import Tap
from qtk.workflow.prepare import prepare_model

I, H, WIDTH, HEADS = 4, 6, 8, 2  # noqa: E741


class Net(nn.Module):
    """Two nets built alike, one that is not, a cell called in a loop, and attention."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.LSTM(I, H, batch_first=True) for _ in range(2))
        self.lstm = nn.LSTM(H, 4, 2, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(8, 5)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        y, _ = self.lstm(self.first(x)[0] + self.second(x)[0])
        state = None
        for step in y.unbind(1):
            state = self.cell(step, state)
        return self.attention(y, y, y, need_weights=False)[0], state


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def prepared(model):
    return prepare_model(model, torch.randn(2, 3, I))


def sites(prepared):
    """Every named value made inside a composite."""
    found = set()
    for path, graph in graphs(prepared).items():
        if path:
            found |= {value_site(n).name for n in graph.graph.nodes if n.op in ("call_function", "call_module")}
    return found


def calls(prepared):
    return {str(n.target): n for n in prepared.graph.nodes if n.op == "call_module" and nested_graphs(n)}


@pytest.mark.slow
def test_values_inside_have_the_module_path_of_the_layer(prepared):
    found = sites(prepared)
    steps = ("lstm.l0", "lstm.l0_reverse", "lstm.l1", "lstm.l1_reverse", "first.l0", "second.l0")
    made = ("projection", "cell.hidden_projection", "cell.gates", "cell.input_gate", "cell.forget_gate",
            "cell.cell_gate", "cell.output_gate", "cell.cell_tanh", "cell.hidden", "cell.cell.addcmul")
    assert {f"{step}.{name}:out" for step in steps for name in made} <= found
    assert {f"attention.attention.core.{name}:out" for name in ("scores", "softmax", "context")} <= found
    gru = ("reset_sum", "reset_gate", "update_gate", "reset_hidden", "new_sum", "new_gate", "hidden")
    for call in ("cell", "cell@1", "cell@2"):  # each call of a cell is a place of its own
        assert {f"{call}.step.cell.{name}:out" for name in gru} <= found
        assert f"{call}.step.projection:out" in found


@pytest.mark.medium
def test_no_two_values_inside_share_a_name(prepared):
    names = [
        value_site(node).name for graph in graphs(prepared).values() for node in graph.graph.nodes
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
    ]
    assert len(names) == len(set(names))


def test_rules_know_what_op_a_value_is_inside_of(prepared):
    within = {str(target).partition(".")[0]: {label(node, COMPOSITE) for graph in nested_graphs(call).values()
                                              for node in graph.graph.nodes}
              for target, call in calls(prepared).items()}
    assert within == {"first": {"lstm_cell"}, "second": {"lstm_cell"}, "lstm": {"lstm_cell"}, "cell": {"gru_cell"},
                      "attention": {"attention_core"}}


def test_composites_built_alike_share_no_graph_and_no_module(prepared):
    found = calls(prepared)
    first, second = (nested_graphs(found[f"{name}.recurrence"]).values() for name in ("first", "second"))
    assert [graph.code for graph in first] == [graph.code for graph in second]
    everything = [module for path, graph in graphs(prepared).items() if path for module in graph.modules()]
    assert len({id(module) for module in everything}) == len(everything)
    nodes = [id(node.meta["custom"]) for graph in (*first, *second) for node in graph.graph.nodes]
    assert len(nodes) == len(set(nodes))


@pytest.mark.slow
def test_composites_built_alike_share_the_capture(monkeypatch):
    captured: list[nn.Module] = []
    place = sys.modules[open_composites.__module__]
    real = place._captured
    monkeypatch.setattr(place, "_captured", lambda *part: captured.append(part[0]) or real(*part))
    prepare_model(Net().eval(), torch.randn(2, 3, I))
    # first = second: 2; lstm: 2 layers × 2 directions × 2; the cell's two later calls are like its first: 2; core: 1
    assert len(captured) == 2 + 8 + 2 + 1


@pytest.mark.parametrize("batch", [1, 5])
def test_the_batch_stays_free_inside(model, prepared, batch):
    x = torch.randn(batch, 3, I)
    composites = [prepared.get_submodule(target) for target in calls(prepared)]
    for module in composites:
        module.add_module("awake", Awake())
    try:
        with torch.no_grad():
            for a, b in zip(model(x), prepared(x), strict=True):
                assert torch.allclose(a, b, atol=1e-6)
    finally:
        for module in composites:
            del module.awake
    with torch.no_grad():
        assert torch.equal(model(x)[1], prepared(x)[1])  # asleep again: torch's own kernels


class Awake(Tap):
    idle = False


def test_the_inside_runs_when_awake_and_only_then(prepared):
    runs = []
    handles = [graph.register_forward_hook(lambda *_: runs.append(1))
               for path, graph in graphs(prepared).items() if path]
    x = torch.randn(2, 3, I)
    prepared(x)
    assert not runs
    module = prepared.get_submodule("attention.attention")
    module.add_module("awake", Awake())
    prepared(x)
    del module.awake
    for handle in handles:
        handle.remove()
    assert len(runs) == 1  # the other composites sleep on


@pytest.mark.medium
def test_the_length_stays_free_inside_attention_where_it_is_free_outside():
    torch.manual_seed(0)

    class Plain(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    prepared = prepare_model(Plain(), torch.randn(2, 3, WIDTH), dynamic_shapes="all")
    prepared.get_submodule("attention").add_module("awake", Awake())
    x = torch.randn(4, 7, WIDTH)
    assert torch.allclose(prepared(x), F.scaled_dot_product_attention(x, x, x), atol=1e-6)


def test_a_part_that_cannot_be_captured_leaves_the_composite_closed_with_a_reason(monkeypatch):
    def refuse(*part):
        raise CaptureError("no such luck")

    monkeypatch.setattr(f"{open_composites.__module__}._captured", refuse)
    torch.manual_seed(0)
    model = nn.GRU(I, H, batch_first=True).eval()
    prepared = prepare_model(model, torch.randn(2, 3, I))
    assert list(graphs(prepared)) == [""]
    assert "no such luck" in str(prepared.report)
    x = torch.randn(3, 3, I)
    assert torch.equal(prepared(x)[0], model(x)[0])


def test_a_graph_without_composites_is_left_alone():
    graph = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    before = graph.code
    assert open_composites(graph) == ()
    assert graph.code == before
