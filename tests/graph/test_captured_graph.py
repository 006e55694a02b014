"""A captured graph is moved and copied as the module it was captured from."""

import copy
import pickle

import pytest
import torch
from torch import fx, nn

from qtk.errors import CaptureError
from qtk.graph.captured_graph import CapturedGraph


def ramp(root: nn.Module) -> CapturedGraph:
    """``x + arange(4)``, the dtype of the ramp baked in."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    kwargs = {"dtype": torch.float32, "device": torch.device("cpu")}
    numbers = graph.call_function(torch.ops.aten.arange.default, (4,), kwargs)
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (x, numbers)))
    return CapturedGraph(root, graph)


def baked(graph: CapturedGraph) -> dict[str, object]:
    return next(node for node in graph.graph.nodes if "arange" in str(node.target)).kwargs


def test_created_tensors_follow_the_dtype_and_device_of_the_parameters():
    graph = ramp(nn.Linear(2, 2))
    assert graph.double()(torch.zeros(4, dtype=torch.float64)).dtype is torch.float64
    assert baked(graph)["dtype"] is torch.float64
    assert graph.to("meta")(torch.zeros(4, device="meta")).device.type == "meta"
    assert baked(graph)["device"].type == "meta"


def test_a_graph_without_tensors_remembers_where_it_was_moved():
    graph = copy.deepcopy(ramp(nn.Module()).double())
    assert graph.float()(torch.zeros(4)).dtype is torch.float32


def test_graphs_for_other_calls_move_along():
    graph, other = ramp(nn.Linear(2, 2)), ramp(nn.Linear(2, 2))
    graph.meta["qtk_variants"] = {"other": other}
    graph.double()
    assert baked(other)["dtype"] is torch.float64


def test_members_that_the_graph_does_not_read_stay():
    root = nn.Linear(2, 2)
    root.register_buffer("spare", torch.ones(1), persistent=False)
    graph = ramp(root)
    assert graph.weight is root.weight
    twin = copy.deepcopy(graph)
    assert list(twin.state_dict()) == ["weight", "bias"]
    assert twin.spare is not root.spare
    assert torch.equal(twin.weight, root.weight)
    assert twin.weight is not root.weight


def test_plain_attributes_are_lent_and_copied():
    original = nn.Linear(2, 2)
    original.labels = ["a", "b"]
    graph = ramp(original)
    graph.lend_attributes(original)
    assert graph.labels is original.labels
    assert graph.in_features == 2
    twin = copy.deepcopy(graph)
    assert twin.labels == ["a", "b"]
    assert twin.labels is not original.labels


def test_a_pickled_graph_is_the_same_and_keeps_what_its_nodes_know():
    original = nn.Linear(2, 2)
    original.labels = ["a", "b"]
    graph = ramp(original)
    graph.lend_attributes(original)
    for node in graph.graph.nodes:
        node.meta["custom"] = {"label": node.name}
    twin = pickle.loads(pickle.dumps(graph))
    x = torch.randn(3, 4)
    assert torch.equal(twin(x), graph(x))
    assert twin.labels == ["a", "b"]
    assert [node.name for node in twin.graph.nodes] == [node.name for node in graph.graph.nodes]
    assert [node.meta.get("custom") for node in twin.graph.nodes] == [
        node.meta.get("custom") for node in graph.graph.nodes]
    twin.to(torch.float64)
    assert twin.weight.dtype == torch.float64
    assert graph.weight.dtype == torch.float32


def test_what_cannot_be_pickled_is_named_with_the_way_out():
    original = nn.Linear(2, 2)
    original.schedule = lambda step: step
    graph = ramp(original)
    graph.lend_attributes(original)
    with pytest.raises(CaptureError, match=r"cannot be pickled if schedule cannot: .* sim\.save\(directory\)"):
        pickle.dumps(graph)
