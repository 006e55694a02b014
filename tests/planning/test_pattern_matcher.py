"""One piece of code looked for in a graph: what a match may vary, and what breaks it."""

import pytest
import torch
from torch import nn

from qtk.planning.normal_form import NormalForm
from qtk.planning.pattern_matcher import PatternMatcher, inner_ops
from qtk.workflow.prepare import prepare_model

X, Y = torch.rand(3, 8) + 0.1, torch.rand(3, 8)


class Net(nn.Module):
    def __init__(self, code):
        super().__init__()
        self.code, self.fc = code, nn.Linear(8, 8)

    def forward(self, x, y=None):
        return self.code(self.fc(x)) if y is None else self.code(self.fc(x), y)


def form_of(code, *inputs):
    return NormalForm(prepare_model(Net(code), inputs or (X,), verify=False).graph)


class Pattern(nn.Module):
    """``x · tanh(x + 0.5)``, or what the test wants."""

    def __init__(self, code):
        super().__init__()
        self.code = code

    def forward(self, x):
        return self.code(x)


def matcher(code=lambda x: x * torch.tanh(x + 0.5)):
    return matcher_of(Pattern(code), X)


def matcher_of(model, inputs):
    form = NormalForm(prepare_model(model, inputs, verify=False).graph)
    form.graph.eliminate_dead_code()
    return PatternMatcher(form.graph)


@pytest.mark.medium
@pytest.mark.parametrize("code", [
    lambda x: x * torch.tanh(x + 0.5),
    lambda x: torch.tanh(0.5 + x) * x,
    lambda x: torch.tanh(x + 0.50001) * x,
    lambda x: (torch.tanh(x.clone() + 0.5) * x).relu(),
])
def test_orders_copies_and_close_numbers_match(code):
    form = form_of(code)
    (match,) = matcher().matches(form)
    assert str(form.original(match.arguments["x"])) == "linear"
    targets = {node.target.overloadpacket.__name__ for node in inner_ops(match, form)}
    assert targets - {"clone"} == {"add", "tanh", "mul"}


@pytest.mark.medium
@pytest.mark.parametrize("code", [
    lambda x: x * torch.tanh(x + 0.51),
    lambda x: x * torch.sigmoid(x + 0.5),
    lambda x: x.relu() * torch.tanh(x + 0.5),
    lambda x: (lambda y: x * y + y)(torch.tanh(x + 0.5)),
    lambda x: x + torch.tanh(x + 0.5),
])
def test_another_number_op_or_operand_or_a_reader_outside_breaks_the_match(code):
    assert list(matcher().matches(form_of(code))) == []


@pytest.mark.medium
def test_every_match_is_found():
    form = form_of(lambda x: (lambda y: y * torch.tanh(y + 0.5))(x * torch.tanh(x + 0.5)))
    assert len(list(matcher().matches(form))) == 2


@pytest.mark.medium
def test_axes_may_be_any_but_the_same():
    norm = matcher(lambda x: x - x.mean(-1, keepdim=True).exp() * x.sum(-1, keepdim=True))
    same = form_of(lambda x: x - x.mean(0, keepdim=True).exp() * x.sum(0, keepdim=True))
    mixed = form_of(lambda x: x - x.mean(0, keepdim=True).exp() * x.sum(1, keepdim=True))
    assert len(list(norm.matches(same))) == 1
    assert list(norm.matches(mixed)) == []


@pytest.mark.medium
def test_two_data_arguments_are_two_values():
    class Two(nn.Module):
        def forward(self, a, b):
            return a * torch.tanh(b)

    two = matcher_of(Two(), (X, Y))
    assert len(list(two.matches(form_of(lambda x, y: x * torch.tanh(y), X, Y)))) == 1
    assert list(two.matches(form_of(lambda x, y: x * torch.tanh(x), X, Y))) == []
