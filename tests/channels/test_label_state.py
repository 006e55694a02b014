"""What a walk asks of the values and labels of a call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from qtk.capture.prepared_model import PreparedGraph
from qtk.channels.absorbers import Absorbers, ParameterOperand
from qtk.channels.channel_classes import PINNED, ZERO, ChannelClasses
from qtk.channels.channel_findings import Findings
from qtk.channels.label_state import LabelState, is_fixed_point, is_float, pinned
from tests.transforms.scaling import prepare
from tests.transforms.scaling_nets import batch, linear, net


def state_of(model: nn.Module, x: torch.Tensor) -> tuple[LabelState, dict[str, fx.Node]]:
    """The state before a walk, and its nodes by the names of their parameters and ops; ``x`` is the input."""
    prepared, classes = prepare(model, x), ChannelClasses()
    assert isinstance(prepared, PreparedGraph)
    names = {"get_attr": lambda node: node.target, "placeholder": lambda node: "x"}
    nodes = {names.get(node.op, lambda node: node.name)(node): node for node in prepared.graph.nodes}
    return LabelState(prepared, classes, Absorbers(prepared, classes), Findings()), nodes


def read(state: LabelState, node: fx.Node) -> ParameterOperand:
    """Gives a node that reads a parameter its labels."""
    parameter = state.graph.get_parameter(str(node.target))
    operand = ParameterOperand(str(node.target), parameter.shape)
    state.labels[node], state.values[node] = operand, parameter
    return operand


def one_layer() -> tuple[LabelState, dict[str, fx.Node]]:
    return state_of(net(lambda m, x: F.relu(m.a(x)) * m.scale, a=linear(3, 5), scale=nn.Parameter(torch.ones(1))),
                    batch(3))


def representatives(state: LabelState, labels: torch.Tensor) -> list[int]:
    found: list[int] = state.classes.representatives()[labels.long()].flatten().tolist()
    return found


@pytest.mark.parametrize(("number", "fixed"), [
    (0, True), (-0.0, True), (float("inf"), True), (-float("inf"), True), (1, False), (1e-300, False),
    (float("nan"), False), ("0", False), (None, False), (torch.zeros(()), False),
])
def test_a_factor_leaves_zero_and_infinity_as_they_are(number: object, fixed: bool) -> None:
    assert is_fixed_point(number) is fixed


@pytest.mark.parametrize(("value", "real"), [
    (torch.zeros(0), True), (torch.zeros(2).half(), True), (torch.zeros(2).int(), False),
    (torch.zeros(2).bool(), False),
    (torch.zeros(2, dtype=torch.complex64), False), (1.0, False), (None, False),
])
def test_floats_are_tensors_of_real_numbers(value: object, real: bool) -> None:
    assert is_float(value) is real


def test_what_depends_on_the_data_of_the_call_varies() -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m.a(x) + torch.ones(x.shape[0], 1, dtype=x.dtype) * m.a.weight.sum()

    state, nodes = state_of(net(forward, a=linear(3, 5)), batch(3))
    varying = {str(name).partition("_")[0] for name, node in nodes.items() if state.varies(node)}
    assert {"x", "linear", "add"} <= varying
    assert varying.isdisjoint({"a.weight", "a.bias", "ones", "sum", "mul", "sym"})
    assert not state.varies(2.0)


def test_labels_of_an_operand() -> None:
    state, nodes = one_layer()
    bias, scale = (read(state, nodes[name]) for name in ("a.bias", "scale"))
    assert [state.of(number).item() for number in (0, None, float("inf"), 2.5)] == [ZERO, ZERO, ZERO, PINNED]
    assert torch.equal(state.of(nodes["a.bias"]), state.absorbers.elements(bias))
    assert state.of(nodes["scale"]).tolist() == [PINNED]
    assert state.name(nodes["scale"]) == scale.name == "scale"
    state.labels[nodes["x"]], state.values[nodes["x"]] = None, torch.zeros(2, 3, dtype=torch.int64)
    assert state.of(nodes["x"]).tolist() == [[PINNED] * 3] * 2
    assert (state.operand(nodes["x"]), state.name(nodes["x"]), state.operand(1.0)) == (None, None, None)


def test_one_added_channel_absorbs_where_one_factor_of_a_product_does_not() -> None:
    state, nodes = one_layer()
    read(state, nodes["scale"])
    (label,) = state.added(nodes["scale"]).tolist()
    assert label > PINNED
    assert state.added(3.0).item() == PINNED


def test_operands_are_pinned_but_for_some() -> None:
    state, nodes = one_layer()
    layer = next(node for name, node in nodes.items() if str(name).startswith("linear"))
    weight, bias = (read(state, nodes[f"a.{leaf}"]) for leaf in ("weight", "bias"))
    x = state.labels[nodes["x"]] = state.classes.new(3)
    elements = [state.absorbers.elements(operand) for operand in (weight, bias)]
    state.pin_operands(layer, but=(nodes["a.bias"],))
    state.absorbers.close()
    assert {*representatives(state, x), *representatives(state, elements[0])} == {PINNED}
    assert PINNED not in representatives(state, elements[1])


def test_pinning_a_tuple_pins_each_of_its_values() -> None:
    state, nodes = one_layer()
    first, second = state.classes.new(2), state.classes.new(3)
    state.labels[nodes["x"]] = [first, None, second]
    state.pin(nodes["x"])
    assert set(representatives(state, torch.cat([first, second]))) == {PINNED}


def test_a_result_has_its_labels_and_pins_what_else_the_op_makes() -> None:
    state, nodes = one_layer()
    node = nodes["x"]
    state.values[node] = (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.zeros(0))
    labels = state.classes.new(3)
    first, second, third = state.spread(labels, node)  # type: ignore[misc]
    assert torch.equal(first, labels.expand(2, 3))
    assert second is None
    assert third.shape == (0,)
    assert pinned(state, node, None)[0].tolist() == [[PINNED] * 3] * 2  # type: ignore[index]
    state.values[node] = torch.zeros(2, dtype=torch.int64)
    assert state.result(node, labels) is None
