"""Statistics of layers inside modules that run as a whole, against their inputs formed one by one."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

import qtk
from qtk.layerwise.input_taps import TAPS
from qtk.layerwise.nested_layers import NestedLayers
from qtk.layerwise.walk import walk
from qtk.moments.holdout import Holdout
from qtk.numerics.error import decibels
from tests.layerwise.branches import EXACT, prepared
from tests.zoo.experts import FusedExperts


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("inputs", ["asym", "symfp"])
def test_layers_inside_a_loop_over_time_see_all_their_calls(inputs):
    torch.manual_seed(1)
    model, batches = Recurrent().eval(), [torch.randn(4, 6, 3) for _ in range(2)]
    sim, _, calls, layers = prepared(model, batches)
    found = {reached.layer.name: reached for reached in walk(
        sim.model, calls, dict.fromkeys(layers, EXACT), inputs=inputs
    )}
    assert set(found) == {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "head.weight"}
    with torch.no_grad():
        x = torch.cat(batches).double()
        hidden = torch.cat([model.lstm(batch)[0] for batch in batches]).double()
    before = torch.cat([torch.zeros(8, 1, 5), hidden[:, :-1]], 1).reshape(-1, 5)  # h0 comes first
    for name, own in (("lstm.weight_ih_l0", x.reshape(-1, 3)), ("lstm.weight_hh_l0", before)):
        moments = found[name].moments
        assert moments.rows == len(own)
        torch.testing.assert_close(moments.gram[0, 0], own.T @ own, rtol=1e-4, atol=1e-4)
    assert [list(module.modules()) for module in sim.model.modules() if "Tap" in type(module).__name__] == []


class OwnPython(nn.Module):
    """Its way depends on the data, so that it stays Python around its parts."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = torch.relu(self.first(x))
        if float(x.sum()) > 0:
            x = self.second(x)
        return self.second(x)


@pytest.mark.medium
def test_layers_in_a_model_that_stays_python():
    torch.manual_seed(0)
    model, batches = OwnPython().eval(), [torch.randn(5, 4) for _ in range(2)]
    sim, _, calls, layers = prepared(model, batches)
    assert not isinstance(sim.model, fx.GraphModule)
    found = {reached.layer.name: reached.moments for reached in walk(sim.model, calls, dict.fromkeys(layers, EXACT))}
    with torch.no_grad():
        first = [torch.relu(model.first(batch)) for batch in batches]
        own = torch.cat([x for each in first for x in (each, model.second(each))]).double()
    torch.testing.assert_close(found["first.weight"].gram[0, 0], torch.cat(batches).double().mT @ torch.cat(
        batches).double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["second.weight"].gram[0, 0], own.T @ own, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        sim.model(batches[0])


@torch.no_grad()
def inputs_by_hand(sim, model, batches, *, quantized):
    """Layer → its inputs in all calls, one after the other, float64."""
    def linear(name, x):
        layer = getattr(model, name)
        weight = sim.quantizers[f"{name}.weight"](layer.weight) if quantized else layer.weight
        return nn.functional.linear(x, weight, layer.bias)

    inputs = {"first.weight": [], "second.weight": []}
    for batch in batches:
        hidden = torch.relu(linear("first", batch))
        inputs["first.weight"].append(batch)
        inputs["second.weight"].append(hidden)
        if float(hidden.sum()) > 0:
            inputs["second.weight"].append(linear("second", hidden))
    return {name: torch.cat(calls).double() for name, calls in inputs.items()}


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_statistics_are_of_the_path_that_is_asked_for(rows, quantized):
    torch.manual_seed(2)
    model, batches = OwnPython().eval(), [torch.randn(rows, 4) for _ in range(3)]
    sim, _, calls, layers = prepared(model, batches, activation_bits=None)
    assert len(layers) == 2
    nested = NestedLayers(sim.model, dict.fromkeys(layers, EXACT), quantized=quantized)
    with nested.listening():
        for index, call in enumerate(calls):
            nested.observe(lambda call=call: sim.model(*call.args), index)
    expected = inputs_by_hand(sim, model, batches, quantized=quantized)
    other = inputs_by_hand(sim, model, batches, quantized=not quantized)
    for layer in layers:
        own = expected[layer.name]
        assert nested.moments[layer].rows == len(own)
        torch.testing.assert_close(nested.moments[layer].gram[0, 0], own.T @ own, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(expected["second.weight"], other["second.weight"])


@pytest.mark.medium
def test_held_out_samples_are_counted_apart_over_all_calls_of_a_layer():
    torch.manual_seed(2)
    model, batches = OwnPython().eval(), [torch.randn(7, 4) for _ in range(2)]
    sim, _, calls, layers = prepared(model, batches, activation_bits=None)
    required = replace(EXACT, holdout=Holdout(0.3))  # two of seven
    nested = NestedLayers(sim.model, dict.fromkeys(layers, required), quantized=False)
    with nested.listening():
        for index, call in enumerate(calls):
            nested.observe(lambda call=call: sim.model(*call.args), index, samples=7)
    inputs = inputs_by_hand(sim, model, batches, quantized=False)
    for layer in layers:
        by_call = inputs[layer.name].unflatten(0, (-1, 7))
        moments = nested.moments[layer]
        for own, rows in ((moments, by_call[:, :5]), (moments.held_out, by_call[:, 5:])):
            x = rows.flatten(0, 1)
            assert own.rows == len(x)
            torch.testing.assert_close(own.gram[0, 0], x.T @ x, rtol=1e-5, atol=1e-6)


@pytest.mark.medium
def test_layers_that_are_not_asked_for_are_left_out_and_nothing_listens_afterwards():
    torch.manual_seed(0)
    sim, _, calls, layers = prepared(OwnPython().eval(), [torch.randn(5, 4)])
    first, second = layers
    nested = NestedLayers(sim.model, {first: None, second: EXACT}, quantized=True)
    with nested.listening():
        nested.observe(lambda: sim.model(*calls[0].args))
    assert list(nested.moments) == [second]
    rows = nested.moments[second].rows
    sim.model(*calls[0].args)
    assert nested.moments[second].rows == rows
    assert not any(layer.quantizer._forward_hooks for layer in layers)
    assert not any(hasattr(module, TAPS) for module in sim.model.modules())


@pytest.mark.medium
def test_a_layer_that_no_call_reaches_has_no_statistics():
    torch.manual_seed(0)
    sim, _, _, layers = prepared(OwnPython().eval(), [torch.randn(5, 4)])
    nested = NestedLayers(sim.model, dict.fromkeys(layers, EXACT), quantized=True)
    with nested.listening():
        nested.observe(lambda: None)
    assert nested.moments == {}


class Memo:
    """What a model returns that is no tensor, so that it stays Python."""


class Islands(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(16, 16), FusedExperts(), nn.Linear(16, 8)

    def forward(self, x):
        return self.last(self.experts(self.first(x))), Memo()


@pytest.mark.slow
def test_a_model_that_stays_python_has_the_same_search_and_says_what_it_cannot_correct():
    torch.manual_seed(0)
    model, mix = Islands().eval(), torch.randn(16, 16) * torch.logspace(0, -1, 16)
    data = [torch.randn(64, 16) @ mix for _ in range(3)]
    sim = qtk.QuantSim(model, data[0], weight_bits=3, activation_bits=None, dynamic_shapes="all")
    sim.compute_encodings(data, progress=False)
    with pytest.warns(match=r"the model runs as Python around its graphs, .*use_cache=False .*inputs=\"symfp\""):
        report = qtk.apply_gptq(sim, data, progress=False)
    results = {result.name: result for result in report.layers}
    assert {"first.weight", "experts.gate_up_proj", "experts.down_proj", "last.weight"} <= results.keys()
    assert all(result.held_out is not None and result.winner.startswith("Gptq, prior") for result in report.layers)
    assert "held out" in str(results["experts.down_proj"])
    with torch.no_grad():
        x, weight = torch.cat(data), model.first.weight
        rounded = sim.quantizers["first.weight"](sim.model.get_parameter("first.weight"))
        truth = decibels((x @ weight.T).square().sum(), (x @ (weight - rounded).T).square().sum())
    assert results["first.weight"].sqnr_db == pytest.approx(truth, abs=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = qtk.apply_gptq(sim, data, options=qtk.LayerwiseOptions(inputs="symfp", start="float"), progress=False)
    assert [each.after for each in again.layers] == [each.after for each in report.layers]
