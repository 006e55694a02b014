"""The update of a layer holds what its methods computed, and writes that and nothing else."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

import qtk
from qtk.core.encoding import Encoding
from qtk.errors import CalibrationError
from qtk.layerwise.layer_update import LayerUpdate, compute_update
from qtk.layerwise.originals import PresentValues
from qtk.layerwise.weighted_layers import weighted_layers
from qtk.moments.required_statistics import RequiredStatistics
from qtk.moments.second_moments import SecondMoments


@dataclass(frozen=True)
class Shift:
    """Adds a number to weights and bias, and multiplies the scales; ``None`` leaves each."""

    weight: float | None = None
    bias: float | None = None
    scale: float | None = None
    needs_bias: ClassVar[bool] = False
    searches_scale: ClassVar[bool] = False

    def min_rows(self, columns):
        return 0

    def refuses(self, spec):
        return None

    def required_statistics(self, block):
        return RequiredStatistics()

    def apply(self, state):
        if self.weight is not None:
            state = replace(state, weight=state.weight + self.weight)
        if self.bias is not None:
            state = replace(state, bias=state.bias + self.bias)
        if self.scale is None:
            return state
        encoding = state.encoding
        return replace(state, encoding=Encoding(encoding.spec, encoding.scale * self.scale, encoding.zero_point))


@dataclass(frozen=True)
class Failing(Shift):
    """Finds no result."""

    def apply(self, state):
        raise CalibrationError("no inverse")


def layer_and_moments(*, bias=True):
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3, bias=bias).eval(), torch.randn(7, 5)
    sim = qtk.QuantSim(model, x, weight_bits=4, activation_bits=None)
    sim.compute_encodings(None, progress=False)
    (layer,), _ = weighted_layers(sim.model, sim.plan)
    moments = SecondMoments(layer.geometry)
    moments.observe(x)
    return layer, moments, x


def values(layer):
    return layer.weight.detach().clone(), None if layer.bias is None else layer.bias.detach().clone()


@pytest.mark.medium
@pytest.mark.parametrize("shift", [
    Shift(), Shift(weight=0.5), Shift(bias=-2.0), Shift(scale=2.0), Shift(0.25, 1.0, 0.5),
])
def test_what_the_method_changed_is_written_and_nothing_else(shift):
    layer, moments, _ = layer_and_moments()
    quantizer, (weight, bias), scale = layer.quantizer, values(layer), layer.quantizer.encoding.scale.clone()
    update = compute_update(layer, [shift], moments)
    assert torch.equal(layer.weight, weight)  # until it is written
    assert torch.equal(quantizer.encoding.scale, scale)
    assert (update.weight is None, update.bias is None) == (shift.weight is None, shift.bias is None)
    written = update.written(layer)
    assert [parameter is layer.weight for parameter in written] == [
        own for own, new in ((True, shift.weight), (False, shift.bias)) if new is not None]
    update.write(layer)
    assert torch.equal(layer.weight, weight + (shift.weight or 0.0))
    assert torch.equal(layer.bias, bias + (shift.bias or 0.0))
    assert torch.equal(quantizer.encoding.scale, scale * (shift.scale or 1.0))
    assert quantizer.frozen == (shift.weight is not None or shift.scale is not None)
    assert quantizer.rewrote_weight == (shift.weight is not None)


@pytest.mark.parametrize("shift", [Shift(bias=1.0), Shift(scale=3.0)])
def test_a_frozen_encoding_stays_frozen(shift):
    layer, moments, _ = layer_and_moments()
    layer.quantizer.frozen = True
    update = compute_update(layer, [shift], moments)
    update.write(layer)
    assert layer.quantizer.frozen
    assert layer.quantizer.encoding.equals(update.encoding)


def test_a_bias_for_a_layer_without_one_is_not_written():
    layer, _, _ = layer_and_moments(bias=False)
    update = LayerUpdate(layer.quantizer.encoding, None, torch.ones(3), 1.0, 1.0)
    assert update.written(layer) == []
    update.write(layer)
    assert layer.bias is None


def test_methods_are_applied_in_order_and_judged_by_the_output():
    layer, moments, x = layer_and_moments()
    update = compute_update(layer, [Shift(weight=1.0), Shift(scale=2.0), Shift(weight=-0.75)], moments)
    torch.testing.assert_close(update.weight, layer.weight.detach() + 0.25)
    scale = layer.quantizer.encoding.scale.double().reshape(-1, 1)

    def error(weight, scale):
        rounded = (weight.detach().double() / scale).round().clamp(-8, 7) * scale
        return float((x.double() @ (layer.weight.detach().double() - rounded).T).square().sum())

    assert update.before == pytest.approx(error(layer.weight, scale), rel=1e-4)
    assert update.after == pytest.approx(error(update.weight, 2 * scale), rel=1e-4)
    assert update.held_out is None
    assert update.winner == "Shift + Shift + Shift"


def test_an_earlier_result_is_what_methods_start_from():
    layer, moments, _ = layer_and_moments()
    encoding = Encoding(layer.quantizer.spec, layer.quantizer.encoding.scale * 3, layer.quantizer.encoding.zero_point)
    present = PresentValues(layer.weight.detach() + 4.0, None, encoding)
    update = compute_update(layer, [Shift(bias=1.0)], moments, present)
    assert torch.equal(update.weight, layer.weight + 4.0)
    assert torch.equal(update.bias, layer.bias + 1.0)
    assert update.encoding.equals(encoding)
    kept = compute_update(layer, [Shift()], moments, PresentValues(None, layer.bias.detach() - 2.0, encoding))
    assert kept.weight is None
    assert torch.equal(kept.bias, layer.bias - 2.0)


def test_a_method_that_fails_names_the_layer():
    layer, moments, _ = layer_and_moments()
    with pytest.raises(CalibrationError, match=r"^weight: no inverse$"):
        compute_update(layer, [Failing()], moments)
    layer.quantizer.drop_encoding()
    with pytest.raises(CalibrationError, match=r"^weight: .*has no encoding to start from"):
        compute_update(layer, [Shift()], moments)
