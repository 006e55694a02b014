import copy
import pickle

import pytest
import torch
from torch import nn

import qtk
from qtk.capture.states import proposed_states, set_states, states_of
from qtk.errors import ConfigError


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8)

    def forward(self, x, h, c):
        y, (h, c) = self.lstm(x, (h, c))
        return y, h, c


INPUTS = torch.randn(3, 2, 4), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)


@pytest.fixture(scope="module")
def prepared():
    return qtk.prepare_model(Stream().eval(), INPUTS)


@pytest.fixture
def model(prepared):
    return copy.deepcopy(prepared)


def test_outputs_are_named_or_numbered_and_stay_with_the_model(model):
    assert states_of(model) == {}
    set_states(model, {"h": 1, "c": "output_2"})
    assert states_of(model) == states_of(copy.deepcopy(model)) == states_of(pickle.loads(pickle.dumps(model))) == {
        "h": 1, "c": 2}


@pytest.mark.parametrize(("states", "error"), [
    ({"g": 1}, r"'g' is no input that is a tensor; "),
    ({"h": 7}, r"'h': there is no output 7; the outputs are 0 \(output_0\), 1 \(output_1\), 2 \(output_2\)"),
    ({"h": "output_9"}, r"'output_9' is no output; did you mean 'output_"),
    ({"h": 0}, r"input 'h' is float32\[1, .*\], output 0 \(output_0\) is float32\[.*, 8\]; a state has the shape"),
    ({"h": 1, "c": 1}, r"'c' and 'h' are both output 1 \(output_1\)"),
])
def test_what_does_not_fit_is_an_error_that_names_both_ends(model, states, error):
    with pytest.raises(ConfigError, match=error):
        set_states(model, states)


def test_what_is_no_state_yet_is_proposed_by_shape_and_place(model):
    assert {site.name: states for site, states in proposed_states(model).items()} == {
        "h:input": {"h": 1}, "c:input": {"c": 2}}
    set_states(model, {"h": 1})
    assert [site.name for site in proposed_states(model)] == ["c:input"]


def test_an_output_with_the_name_of_the_input_is_proposed_first():
    class Named(nn.Module):
        def forward(self, a, b):
            return {"b": a + b, "a": a - b}

    x = torch.randn(2, 3)
    assert {k.name: v for k, v in proposed_states(qtk.prepare_model(Named(), (x, x))).items()} == {
        "a:input": {"a": 1}, "b:input": {"b": 0}}
