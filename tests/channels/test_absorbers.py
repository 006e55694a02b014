"""The parameters that absorb factors, against factors written out element by element."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from qtk.channels.absorbers import Absorbers, ParameterOperand
from qtk.channels.channel_classes import PINNED, ChannelClasses


def absorbers(**shapes: tuple[int, ...]) -> tuple[Absorbers, ChannelClasses]:
    classes = ChannelClasses()
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()})
    return Absorbers(model, classes), classes


def random_factors(classes: ChannelClasses) -> Tensor:
    factors = torch.rand(classes.count, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    factors[: PINNED + 1] = 1
    return factors


def matrix(shape: tuple[int, int]) -> tuple[ParameterOperand, Tensor, Tensor]:
    """A weight [out, in], and the output and the input channel of its elements."""
    rows, columns = (torch.arange(length) for length in shape)
    return ParameterOperand("weight", torch.Size(shape)), rows[:, None], columns[None]


@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (1, 7), (7, 1)])
def test_a_weight_absorbs_the_factor_of_its_output_over_the_factor_of_its_input(shape: tuple[int, int]) -> None:
    made, classes = absorbers(weight=shape)
    operand, rows, columns = matrix(shape)
    inputs = classes.new(shape[1])
    outputs = made.use_weight(operand, rows, shape[0], columns, inputs).outputs
    made.close()
    factors = random_factors(classes)
    found = made.factors(factors)["weight"].expand(shape)
    for row, column in itertools.product(*map(range, shape)):
        expected = float(factors[int(outputs[row])]) / float(factors[int(inputs[column])])
        assert float(found[row, column]) == pytest.approx(expected, rel=1e-15)


def test_a_parameter_that_is_added_has_a_factor_for_each_element() -> None:
    made, classes = absorbers(bias=(7,), empty=(0,))
    bias, part = ParameterOperand("bias", torch.Size([7])), torch.tensor([[6.0], [2.0]], dtype=torch.float64)
    labels = made.elements(bias)
    assert torch.equal(labels, made.elements(bias))
    assert len(labels.unique()) == 7
    assert made.elements(ParameterOperand("bias", part.shape, part)).tolist() == [[labels[6]], [labels[2]]]
    made.elements(ParameterOperand("empty", torch.Size([0])))
    factors = random_factors(classes)
    assert made.factors(factors).keys() == {"bias"}
    assert made.factors(factors)["bias"].tolist() == [float(factors[int(label)]) for label in labels]
    assert made.factors(torch.ones_like(factors)) == {}


def test_the_same_use_for_the_second_time_makes_the_factors_of_both_inputs_equal() -> None:
    made, classes = absorbers(weight=(5, 3))
    operand, rows, columns = matrix((5, 3))
    inputs = [classes.new(3), classes.new(3)]
    first, second = (made.use_weight(operand, rows, 5, columns, labels) for labels in inputs)
    made.close()
    assert torch.equal(first.outputs, second.outputs)
    representatives = classes.representatives()
    assert torch.equal(representatives[inputs[0].long()], representatives[inputs[1].long()])
    assert bool((representatives[first.outputs.long()] > PINNED).all())


def test_uses_with_other_axes_pin_both() -> None:
    made, classes = absorbers(weight=(3, 3))
    operand, rows, columns = matrix((3, 3))
    uses = [made.use_weight(operand, *axes, classes.new(3)) for axes in ((rows, 3, columns), (columns, 3, rows))]
    made.close()
    representatives = classes.representatives()
    for use in uses:
        assert use.inputs is not None
        assert set(representatives[torch.cat([use.outputs, use.inputs]).long()].tolist()) == {PINNED}
    assert made.factors(random_factors(classes)[representatives]) == {}


def test_halves_of_a_weight_have_factors_of_their_own_and_an_element_that_serves_twice_pins() -> None:
    made, classes = absorbers(weight=(4, 3))
    positions = torch.arange(12, dtype=torch.float64).view(4, 3)
    rows, columns = torch.arange(2)[:, None], torch.arange(3)[None]
    upper, lower = (
        made.use_weight(ParameterOperand("weight", half.shape, half), rows, 2, columns, classes.new(3))
        for half in (positions[:2], positions[2:])
    )
    made.close()
    factors = random_factors(classes)
    expected = torch.cat([
        factors[use.outputs.long()][:, None] / factors[use.inputs.long()] for use in (upper, lower)
        if use.inputs is not None
    ])
    torch.testing.assert_close(made.factors(factors)["weight"], expected, rtol=1e-15, atol=0)
    twice, _ = absorbers(weight=(4, 3))
    repeated = positions[[0, 0]]
    twice.use_weight(ParameterOperand("weight", repeated.shape, repeated), rows, 2)
    twice.close()
    assert twice._classes.representatives().unique().tolist() == [0, PINNED]


def test_a_weight_that_is_added_too_is_pinned() -> None:
    made, classes = absorbers(weight=(5, 3))
    operand, rows, _ = matrix((5, 3))
    made.elements(operand)
    made.use_weight(operand, rows, 5)
    made.close()
    assert classes.representatives().unique().tolist() == [0, PINNED]


def test_floating_point_parameters_alone_have_names() -> None:
    codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    model = nn.ParameterDict({"real": nn.Parameter(torch.ones(2)), "codes": codes})
    made = Absorbers(model, ChannelClasses())
    assert made.name(model["real"]) == "real"
    assert [made.name(other) for other in (model["codes"], model["real"].clone(), 1.0, None)] == [None] * 4
