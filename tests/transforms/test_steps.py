import copy

import torch
from torch import nn

import qtk
from qtk.transforms.steps import RemoveParameters, ScaleParameter, is_transformed, make, op_changes, steps_of


def prepared():
    torch.manual_seed(0)
    return qtk.prepare_model(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).eval(), torch.randn(2, 4))


def test_steps_are_made_in_order_and_remembered():
    model = prepared()
    weight = model.get_parameter("0.weight")
    before = weight.detach().clone()
    factor = torch.tensor([[2.0], [3.0], [0.5]], dtype=torch.float64)
    steps = [ScaleParameter("0.weight", factor), ScaleParameter("0.weight", torch.full((1, 1), 4.0).double())]
    make(model, steps)
    assert torch.equal(model.get_parameter("0.weight"), (before.double() * factor).float() * 4)
    assert torch.equal(weight, before)  # another model may hold it
    assert steps_of(model) == tuple(steps)
    assert op_changes(model) == []
    make(model, [RemoveParameters(()), RemoveParameters(())])
    assert op_changes(model) == ["RemoveParameters"]
    assert [step.parameter for step in steps_of(copy.deepcopy(model))[:2]] == ["0.weight", "0.weight"]


def test_a_model_without_steps_is_told_from_one_that_was_not_transformed():
    model = prepared()
    assert not is_transformed(model)
    make(model, [])
    assert is_transformed(model)
    assert steps_of(model) == ()


def test_the_scaling_is_rounded_once():
    weight = torch.rand(1000)
    state = {"w": weight}
    factor = torch.rand(1000, dtype=torch.float64)
    ScaleParameter("w", factor).update(state)
    assert torch.equal(state["w"], (weight.double() * factor).float())


def test_removed_parameters_are_gone():
    state = {"a": torch.zeros(1), "b": torch.zeros(1)}
    RemoveParameters(("a", "missing")).update(state)
    assert list(state) == ["b"]
