import pytest
import torch
from torch import fx, nn

from qtk.capture.holders import free_name, hold, hold_constants, holder
from qtk.errors import CaptureError
from qtk.graph.targets import attribute


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.a = self.b
        self.nothing = None
        self.register_parameter("absent", None)
        self.register_buffer("table", torch.arange(3), persistent=False)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)


def test_holds_the_very_tensors_under_the_same_names_in_the_same_order():
    net = Net()
    held = hold(net)
    assert list(held.state_dict()) == list(net.state_dict())
    assert [name for name, _ in held.named_buffers()] == [name for name, _ in net.named_buffers()]
    assert all(a is b for a, b in zip(held.parameters(), net.parameters(), strict=True))
    assert held.a is held.b
    assert held.absent is None
    assert not held.scale.requires_grad


@pytest.mark.parametrize("name", ["graph", "report", "meta", "recompile"])
def test_a_name_the_prepared_model_needs_is_refused(name):
    net = nn.Module()
    net.add_module(name, nn.Linear(1, 1)) if name != "recompile" else net.register_buffer(name, torch.ones(1))
    with pytest.raises(CaptureError, match=f"members called {name}"):
        hold(net)


def test_such_a_name_deeper_down_is_fine():
    net = nn.Sequential(nn.Module())
    net[0].graph = nn.Linear(1, 1)
    assert list(hold(net).state_dict()) == ["0.graph.weight", "0.graph.bias"]


def test_constants_of_the_code_become_buffers_outside_the_state():
    root, graph = nn.Module(), fx.Graph()
    captured = nn.Module()
    captured.lifted = torch.ones(2)
    captured.inner = nn.Module()
    captured.inner.weight = nn.Parameter(torch.zeros(3))
    graph.output((graph.get_attr("lifted"), graph.get_attr("inner.weight")))
    hold_constants(root, fx.GraphModule(captured, graph))
    assert list(root.state_dict()) == ["inner.weight"]
    assert [name for name, _ in root.named_buffers()] == ["lifted"]


def test_names():
    root = nn.Module()
    holder(root, "a.b").leaf = 3
    assert attribute(root, "a.b.leaf") == 3
    assert free_name(root, "a.b.leaf") == "a.b.leaf_1"
    assert free_name(root, "a.c") == "a.c"
    assert free_name(root, "new") == "new"
    assert holder(root, "") is root
