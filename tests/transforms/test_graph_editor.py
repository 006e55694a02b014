"""Edits of captured graphs by the names of parameters and sites."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import qtk
from qtk.capture.prepared_model import PreparedModel
from qtk.core.site import Site
from qtk.transforms.graph_editor import GraphEditor, add_module, beside, erase, read_parameter, weight_parameter
from tests.transforms.nets import IMAGE, InPython, SharedPair, randomized
from tests.transforms.scaling_nets import linear, net

X = torch.randn(3, 4)


def two_layers() -> PreparedModel:
    return qtk.prepare_model(net(lambda m, x: m.b(F.relu(m.a(x))), a=linear(4, 5, False), b=linear(5, 2)).eval(), X)


def nodes_of(model: PreparedModel) -> dict[str, fx.Node]:
    """Name of what is read or computed → node."""
    return {node.target if node.op == "get_attr" else node.name: node for node in model.graph.nodes}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("build", "layers", "calls"), [(SharedPair, 2, 1), (InPython, 1, 1)])
def test_layers_are_found_by_their_weight_and_values_by_their_site(
    build: Callable[[], nn.Module], layers: int, calls: int
) -> None:
    model = qtk.prepare_model(randomized(build()), torch.randn(IMAGE, dtype=torch.float64))
    editor = GraphEditor(model)
    weight, owner = ("conv.weight", "conv") if build is SharedPair else ("block.0.weight", "block.0")
    found = list(editor.layers(weight))
    assert len(found) == layers
    assert all(editor.name(node.args[1]) == weight for _, node in found)
    assert [node for _, node in editor.makers(Site(owner, "", "out"))] == [node for _, node in found][:calls]
    assert list(editor.layers("missing")) == list(editor.makers(Site("missing", "", "out"))) == []


def test_an_edited_graph_runs_its_new_code_when_the_editor_closes() -> None:
    model = two_layers()
    a, b = model.get_parameter("a.weight"), model.get_submodule("b")
    editor = GraphEditor(model)
    ((_, relu),) = editor.makers(Site("", "relu", "out"))
    relu.replace_all_uses_with(relu.args[0])
    erase(relu)
    editor.close()
    torch.testing.assert_close(model(X), F.linear(X @ a.T, b.weight, b.bias))
    assert float(model(X).sub(F.linear((X @ a.T).relu(), b.weight, b.bias)).abs().max()) > 1e-3


WEIGHTS: dict[str, tuple[Callable[..., torch.Tensor], str | None]] = {
    "linear": (lambda m, x: F.linear(x, m.square), "square"),
    "right factor": (lambda m, x: x @ m.square, "square"),
    "left factor": (lambda m, x: m.square @ x.T, None),
    "addmm": (lambda m, x: torch.addmm(m.row, x, m.square), "square"),
    "convolution": (lambda m, x: F.conv1d(x[None], m.kernel), "kernel"),
    "computed": (lambda m, x: F.linear(x, m.square.tanh()), None),
    "added": (lambda m, x: x + m.row, None),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_weight_of_a_layer_is_the_parameter_that_it_multiplies(name: str) -> None:
    formula, expected = WEIGHTS[name]
    model = qtk.prepare_model(net(
        formula, square=nn.Parameter(torch.ones(4, 4)), row=nn.Parameter(torch.ones(4)),
        kernel=nn.Parameter(torch.ones(2, 3, 1)),
    ).eval(), X)
    found = [weight.target for node in model.graph.nodes if (weight := weight_parameter(node)) is not None]
    assert found == ([] if expected is None else [expected])


def test_a_parameter_that_is_read_for_the_first_time_is_added_beside_another() -> None:
    model = two_layers()
    weight = nodes_of(model)["a.weight"]
    node = read_parameter(model, "a.bias", weight, new=torch.zeros(5))
    assert (weight.next, node.target) == (node, "a.bias")
    assert [type(length) for length in node.meta["val"].shape] == [int]
    assert isinstance(model.get_parameter("a.bias"), nn.Parameter)
    added = model.get_parameter("a.bias")
    assert read_parameter(model, "a.bias", weight, new=torch.ones(5)) is node
    assert model.get_parameter("a.bias") is added
    assert list(model.state_dict()) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    frozen = nn.Parameter(torch.ones(0), requires_grad=False)
    read_parameter(model, "a.extra", weight, new=frozen)
    assert model.get_parameter("a.extra") is frozen


def test_a_parameter_that_the_graph_reads_later_is_read_before_everything() -> None:
    model = two_layers()
    nodes = nodes_of(model)
    assert read_parameter(model, "b.bias", nodes["a.weight"], new=torch.ones(2)) is nodes["b.bias"]
    assert next(node for node in model.graph.nodes if node.op != "placeholder") is nodes["b.bias"]
    model.graph.lint()


def test_added_modules_have_names_of_their_own() -> None:
    model = two_layers()
    first, second = (add_module(model, "a.scale_shift", nn.Identity()) for _ in range(2))
    assert first == "a.scale_shift"
    assert first != second
    assert second.startswith("a.scale_shift")
    assert {first, second} <= {name for name, _ in model.named_modules()}


@pytest.mark.parametrize(("path", "expected"), [
    ("weight", "bias"), ("conv.weight", "conv.bias"), ("blocks.0.conv.weight", "blocks.0.conv.bias"),
])
def test_beside_is_in_the_same_module(path: str, expected: str) -> None:
    assert beside(path, "bias") == expected


def test_erasing_a_node_erases_the_parameters_that_it_alone_read() -> None:
    model = qtk.prepare_model(
        net(lambda m, x: (m.a(x) * m.b.bias, m.b(x)), a=linear(4, 2), b=linear(4, 2)).eval(), X)
    (product,) = [node for node in model.graph.nodes if node.name.startswith("mul")]
    layer = product.args[0]
    product.replace_all_uses_with(layer)
    erase(product)
    assert "b.bias" in nodes_of(model)
    layer.replace_all_uses_with(layer.args[0])
    erase(layer)
    assert {name for name in nodes_of(model) if "." in name} == {"b.weight", "b.bias"}
    model.graph.lint()
