import pytest
import torch
from torch import nn

import qtk
from qtk.graph.graphs import graphs
from qtk.transforms.named_tensors import NamedTensors
from qtk.transforms.snapshot import Snapshot, unchanged_on_error
from tests.transforms.nets import InPython


def prepared():
    torch.manual_seed(0)
    return qtk.prepare_model(InPython().eval(), torch.randn(2, 4, 5, 5))


def spoil(model):
    """Changes graph, parameters, submodules and report of ``model``, without writing to a tensor."""
    graph = next(iter(graphs(model).values()))
    node = next(node for node in graph.graph.nodes if "relu" in str(node.target))
    node.replace_all_uses_with(node.args[0])
    graph.graph.erase_node(node)
    graph.recompile()
    graph.add_module("added", nn.ReLU())
    members = NamedTensors(model)
    name = next(iter(members.tensors()))
    members.replace({name: torch.zeros_like(members.tensor(name))})
    model.meta["added"] = 1


@pytest.mark.medium
def test_a_model_returns_to_its_state():
    model, x = prepared(), torch.randn(2, 4, 5, 5)
    expected, keys, tensors = model(x), list(model.state_dict()), list(model.parameters())
    snapshot = Snapshot(model)
    spoil(model)
    assert not torch.equal(model(x), expected)
    snapshot.restore()
    assert torch.equal(model(x), expected)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), tensors, strict=True))
    assert "added" not in model.meta
    assert not any(name.endswith("added") for name, _ in model.named_modules())


@pytest.mark.medium
def test_only_an_error_restores():
    model, x = prepared(), torch.randn(2, 4, 5, 5)
    expected = model(x)
    with pytest.raises(TypeError), unchanged_on_error(model):
        spoil(model) + 1
    assert torch.equal(model(x), expected)
    with unchanged_on_error(model):
        spoil(model)
    assert not torch.equal(model(x), expected)
