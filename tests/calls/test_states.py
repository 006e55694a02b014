import copy
import pickle

import pytest
import torch
from torch import nn

import qtk
from qtk.calls.signature import output_nodes
from qtk.calls.states import grown_axes, proposed_states, set_states
from qtk.errors import ConfigError
from qtk.graph.graphs import STATES, states_of


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


class Other(nn.Module):
    """Inputs as long as an output that are no states."""

    def __init__(self, forward):
        super().__init__()
        self.compute = forward

    def forward(self, x, h):
        return self.compute(x[..., 0], h)


@pytest.mark.parametrize("forward", [
    lambda x, h: x + h,  # the only result: a sum of two inputs, a residual
    lambda x, h: (x * 2, h * 1.5),  # the second follows from h alone
    lambda x, h: ((h + x).sum(), x * 3),  # nor is it computed from h
], ids=["one result", "by itself", "independent"])
def test_an_ordinary_input_is_not_proposed(forward):
    model = qtk.prepare_model(Other(forward), (torch.randn(2, 3, 1), torch.zeros(2, 3)))
    assert proposed_states(model) == {}


class Cache(nn.Module):
    """Keys and values of two layers, to which each call adds some."""

    def forward(self, x, past):
        x = x[..., 0]
        return x + 1, [(torch.cat([keys, x], 1), torch.cat([values, -x], 1)) for keys, values in past]


def cache(length):
    return [(torch.randn(2, length, 3), torch.randn(2, length, 3)) for _ in range(2)]


@pytest.fixture(scope="module")
def growing():
    return qtk.prepare_model(Cache(), (torch.randn(2, 4, 3, 1), cache(5)), dynamic_shapes="all")


ALL = {"past_0_0": 1, "past_0_1": 2, "past_1_0": 3, "past_1_1": 4}


@pytest.mark.medium
@pytest.mark.parametrize(("states", "expected"), [
    ({"past": 1}, ALL), ({"past": "output_1"}, ALL), (ALL, ALL), ({"past.1": 3}, {"past_1_0": 3, "past_1_1": 4}),
    ({"past.0.1": "output_1.0.1"}, {"past_0_1": 2}),
])
def test_a_nested_state_pairs_tensor_by_tensor_and_may_grow(growing, states, expected):
    set_states(growing, states)
    assert states_of(growing) == expected
    assert grown_axes(growing) == dict.fromkeys(expected, (1,))


class Window(nn.Module):
    """Keeps the last two frames, however many it was given."""

    def forward(self, x, kept):
        frames = torch.cat([kept, x], 1)
        return frames.sum(1), frames[:, -2:]


def test_a_state_of_any_length_may_be_as_long_as_in_the_example():
    model = qtk.prepare_model(Window(), (torch.randn(3, 5, 4), torch.randn(3, 2, 4)), dynamic_shapes="all")
    set_states(model, {"kept": 1})
    assert states_of(model) == {"kept": 1}
    assert grown_axes(model) == {"kept": ()}
    longer = qtk.prepare_model(Window(), (torch.randn(3, 5, 4), torch.randn(3, 7, 4)), dynamic_shapes="all")
    with pytest.raises(ConfigError, match=r"input 'kept' is float32.*, output 1 .output_1. is float32.*; a state has"):
        set_states(longer, {"kept": 1})


@pytest.mark.parametrize(("states", "error"), [
    ({"past": 2}, r"'past' holds 4 tensors \(past.0.0, past.0.1, past.1.0, past.1.1\), 2 3 \(output_1.0.1, "),
    ({"past": "output_1.0"}, r"'output_1.0' 2 \(output_1.0.0, output_1.0.1\); they pair one by one"),
    ({"past": 0}, r"input 'past_0_0' is float32\[.*\], output 0 \(output_0\) is .*; a state has the shape and dtype"),
    ({"past.2": 1}, r"'past.2' is no input that is a tensor; "),
])
def test_a_nested_state_that_does_not_fit_is_an_error_that_names_both_ends(growing, states, error):
    with pytest.raises(ConfigError, match=error):
        set_states(growing, states)


def test_an_axis_grows_only_if_it_is_free():
    model = qtk.prepare_model(Cache(), (torch.randn(2, 4, 3, 1), cache(5)))
    with pytest.raises(ConfigError, match=r"'past_0_0' is .*5, 3\], output 1 \(output_1.0.0\) is .*9, 3\]; .* free "):
        set_states(model, {"past": 1})


def test_a_state_of_another_dtype_is_refused():
    class Narrow(nn.Module):
        def forward(self, x, h):
            return x, (h + x).half()

    model = qtk.prepare_model(Narrow(), (torch.ones(2, 3), torch.ones(2, 3)))
    with pytest.raises(ConfigError, match=r"'h' is float32\[.*, 3\], output 1 \(output_1\) is float16\["):
        set_states(model, {"h": 1})


def test_the_tensors_of_a_dict_pair_by_their_keys():
    class Named(nn.Module):
        def forward(self, x, state):
            return x, {"b": state["b"] * 2, "a": state["a"] + x}

    x = torch.ones(2, 3)
    for states in ({"state": 1}, {"state": "output_1"}):
        model = qtk.prepare_model(Named(), (x, {"a": x, "b": x}))
        set_states(model, states)
        assert {name: [*output_nodes(model)][index] for name, index in states_of(model).items()} == {
            "state_a": "output_1.a", "state_b": "output_1.b"}


def test_a_model_that_stays_python_is_refused_with_the_way_to_the_reason():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x, h):
            h = self.a(x) if float(h.sum()) > 0 else self.b(x)
            return x, h

    model = qtk.prepare_model(Branching(), (torch.ones(2, 3), torch.ones(2, 3)))
    with pytest.raises(ConfigError, match=r"captured as one graph; .*: print\(model.report\) says why"):
        set_states(model, {"h": 1})


def test_a_cache_that_is_no_state_yet_is_proposed(growing):
    growing.meta.pop(STATES, None)
    assert {site.name: states for site, states in proposed_states(growing).items()} == {
        f"{name}:input": {name: index} for name, index in ALL.items()}
