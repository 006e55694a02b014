"""A wrong op in a captured graph is named with the module it belongs to."""

import pytest
import torch
from torch import nn

from qtk.calls.calls import Call
from qtk.capture import fallback
from qtk.capture.fallback import capture_graph
from qtk.capture.first_difference import first_difference
from qtk.errors import CaptureError

X = torch.randn(4, 8)
CALL = Call((X,), {}, None)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) + 1


def captured(model, place=""):
    return capture_graph(model.eval(), [CALL], "batch", verify=False, around=fallback.Surroundings(place))


def plant(graph, old, new, which=0):
    """Replaces the op of one node by another."""
    nodes = [node for node in graph.graph.nodes if node.target is old]
    nodes[which].target = new
    graph.recompile()


ATEN = torch.ops.aten


@pytest.mark.medium
@pytest.mark.parametrize(
    ("old", "which", "module"),
    [(ATEN.relu.default, 0, "stem.1"), (ATEN.tanh.default, 0, "blocks.0.1"), (ATEN.tanh.default, 1, "blocks.1.1")],
)
def test_the_module_of_a_wrong_op_is_named(old, which, module):
    model = Net()
    graph = captured(model)
    plant(graph, old, ATEN.sigmoid.default, which)
    found = first_difference(model, graph, [CALL])
    assert found.startswith(f"{module}: its output differs by ")


def test_the_first_of_several_is_named():
    model = Net()
    graph = captured(model)
    plant(graph, ATEN.tanh.default, ATEN.sigmoid.default, 1)
    plant(graph, ATEN.tanh.default, ATEN.sigmoid.default, 0)
    assert first_difference(model, graph, [CALL]).startswith("blocks.0.1: ")


def test_the_place_of_an_island_goes_before():
    model = Net()
    graph = captured(model, place="backbone.body")
    plant(graph, ATEN.relu.default, ATEN.sigmoid.default)
    assert first_difference(model, graph, [CALL]).startswith("backbone.body.stem.1: ")


def test_another_shape_is_a_difference():
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 8))
    graph = captured(model)
    other = nn.Sequential(nn.Flatten(0), nn.Identity())
    assert first_difference(other, graph, [CALL]).startswith("0: its output is torch.float32 of shape (4, 8), was ")


def test_no_difference_no_name():
    model = Net()
    assert first_difference(model, captured(model), [CALL]) is None


def test_of_a_module_called_twice_the_first_call_is_compared():
    class Twice(Net):
        def forward(self, x):
            return self.norm(self.stem(self.stem(x)))

    model = Twice()
    graph = captured(model)
    assert first_difference(model, graph, [CALL]) is None
    plant(graph, ATEN.relu.default, ATEN.sigmoid.default, 0)
    assert first_difference(model, graph, [CALL]).startswith("stem.1: ")


def test_an_op_outside_every_submodule_has_no_name():
    model = Net()
    graph = captured(model)
    plant(graph, ATEN.add.Tensor, ATEN.sub.Tensor)
    assert first_difference(model, graph, [CALL]) is None


@pytest.mark.medium
def test_a_wrong_weight_is_found_too_and_nothing_is_changed():
    model, other = Net(), Net()
    graph = captured(other)
    other.load_state_dict(model.state_dict())
    assert first_difference(model, graph, [CALL]) is None
    with torch.no_grad():
        other.blocks[1][0].bias += 1
    state = {key: value.clone() for key, value in model.state_dict().items()}
    assert first_difference(model.train(), graph, [CALL]).startswith("blocks.1.0: ")
    assert model.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.medium
def test_the_error_of_a_capture_that_differs_ends_with_the_name(monkeypatch):
    real = fallback.canonicalize

    def wrong(*args, **kwargs):
        graph, swaps = real(*args, **kwargs)
        plant(graph, ATEN.relu.default, ATEN.sigmoid.default)
        return graph, swaps

    monkeypatch.setattr(fallback, "canonicalize", wrong)
    with pytest.raises(CaptureError, match=r"the first module to differ is stem\.1: its output differs"):
        capture_graph(Net().eval(), [CALL], "batch", verify=True)
