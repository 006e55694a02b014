"""A run updates layer after layer, warns of data that is too little, and undoes its work if it fails."""

import signal
import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

import qtk
from qtk.calls.calls import Call
from qtk.errors import CalibrationError
from qtk.layerwise import run
from qtk.layerwise.gptq import Gptq
from qtk.layerwise.options import LayerwiseOptions
from qtk.layerwise.originals import EarlierResults, Originals
from qtk.layerwise.weighted_layers import weighted_layers
from qtk.moments.required_statistics import RequiredStatistics
from tests.layerwise.convolutional_net import problem, same, state


def test_few_data_are_warned_of():
    _, sim, data = problem()
    with pytest.warns(UserWarning, match="3 layers saw fewer rows"):
        qtk.apply_gptq(sim, [data[0][:2]], progress=False)


def test_groups_without_a_judge_are_warned_of():
    _, sim, data = problem()
    with pytest.warns(UserWarning, match="groups: the results of BiasCorrection are not judged"):
        qtk.correct_bias(sim, data, options=qtk.LayerwiseOptions(groups=["a", "a", "b", "b"]), progress=False)


@pytest.mark.medium
def test_a_layer_that_fails_undoes_those_before(monkeypatch):
    _, sim, data = problem()
    before, real, calls = state(sim), run.compute_update, []

    def compute_update(layer, *rest):
        calls.append(layer.name)
        if layer.name == "fc2.weight":
            raise CalibrationError("fc2.weight: no inverse")
        return real(layer, *rest)

    monkeypatch.setattr(run, "compute_update", compute_update)
    with pytest.raises(CalibrationError, match="no inverse"):
        qtk.apply_layerwise(sim, data, ["seq_mse", "gptq", "bias_correction"], progress=False)
    assert len(calls) == 3
    assert same(before, state(sim))


@pytest.mark.medium
def test_an_interrupt_keeps_finished_layers_in_the_checkpoint_alone(monkeypatch, tmp_path):
    _, sim, data = problem()
    before, real, calls = state(sim), run.compute_update, []

    def compute_update(layer, *rest):
        calls.append(layer.name)
        if layer.name == "fc1.weight":
            signal.raise_signal(signal.SIGINT)
        return real(layer, *rest)

    monkeypatch.setattr(run, "compute_update", compute_update)
    with pytest.raises(KeyboardInterrupt):
        qtk.apply_gptq(sim, data, options=qtk.LayerwiseOptions(checkpoint_dir=tmp_path), progress=False)
    assert calls == ["conv.weight", "fc1.weight"]
    assert same(before, state(sim))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000.safetensors", "run.json"]
    monkeypatch.setattr(run, "compute_update", lambda layer, *rest: calls.append(layer.name) or real(layer, *rest))
    qtk.apply_gptq(sim, data, options=qtk.LayerwiseOptions(checkpoint_dir=tmp_path), progress=False)
    assert calls[2:] == ["fc1.weight", "fc2.weight"]
    uninterrupted = problem()[1]
    qtk.apply_gptq(uninterrupted, data, progress=False)
    assert same(state(uninterrupted), state(sim))


class Experts(nn.Module):
    """Stays Python, and runs its second layer only for data that are positive."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        return self.second(y) if float(x.sum()) > 0 else y


def run_of(sim, data, methods, originals=None):
    layers, _ = weighted_layers(sim.model, sim.plan)
    calls = [Call((x,), {}, None) for x in data]
    earlier = EarlierResults(originals or Originals(layers))
    return layers, run.LayerwiseRun(sim.model, methods, layers, calls, LayerwiseOptions(holdout=0.0), earlier)


@pytest.mark.medium
def test_a_layer_that_no_data_reaches_is_left_with_the_reason():
    torch.manual_seed(0)
    data = [torch.rand(64, 4), -torch.rand(64, 4)]
    sim = qtk.QuantSim(Experts().eval(), data[0], weight_bits=4)
    sim.compute_encodings(data, progress=False)
    before = state(sim)[0]
    layers, own = run_of(sim, data[1:], [Gptq()])
    first, second = own.finish(progress=False)
    assert [layer.name for layer in layers] == [first.name, second.name] == ["first.weight", "second.weight"]
    assert (first.reason, second.reason) == (None, "no data reached it")
    assert torch.equal(sim.model.get_parameter("second.weight"), before["second.weight"])
    assert not torch.equal(sim.model.get_parameter("first.weight"), before["first.weight"])
    assert [layer.quantizer.frozen for layer in layers] == [True, False]


@dataclass(frozen=True)
class Seen:
    """Records the error of each layer as it is reached, and halves the bias."""

    errors: list
    rows: int = 0
    needs_bias: ClassVar[bool] = True
    searches_scale: ClassVar[bool] = False

    def min_rows(self, columns):
        return self.rows

    def refuses(self, spec):
        return None

    def required_statistics(self, block):
        return RequiredStatistics(block)

    def apply(self, state):
        self.errors.append((state.name, state.moments.rows))
        return replace(state, bias=state.bias / 2)


@pytest.mark.medium
def test_every_layer_is_updated_once_and_in_order_and_its_originals_are_kept():
    _, sim, data = problem()
    seen, (before, _) = [], state(sim)
    originals = Originals(weighted_layers(sim.model, sim.plan)[0])
    layers, own = run_of(sim, data, [Seen(seen)], originals=originals)
    results = own.finish(progress=False)
    samples = sum(len(x) for x in data)
    assert seen == [("conv.weight", samples * 9), ("fc1.weight", samples), ("fc2.weight", samples)]
    assert [result.name for result in results] == [layer.name for layer in layers]
    for layer in layers:
        name = layer.name.removesuffix("weight") + "bias"
        assert torch.equal(layer.bias, before[name] / 2)
    originals.restore()
    assert all(torch.equal(value, before[name]) for name, value in state(sim)[0].items())


@pytest.mark.medium
@pytest.mark.parametrize(("rows", "count"), [(128, 0), (129, 2), (1152, 2), (1153, 3)])
def test_a_layer_is_short_of_data_below_the_rows_its_methods_need(rows, count):
    _, sim, data = problem()  # 128 samples, 9 positions of the convolution in each
    _, own = run_of(sim, data, [Seen([]), Seen([], rows)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own.finish(progress=False)
    said = [str(each.message).partition(" saw")[0] for each in caught]
    assert said == ([f"{count} layers"] if count else [])
