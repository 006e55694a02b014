"""Inputs in several units, or with a large offset, that constants bring into one range, against the float model."""

import re
import warnings

import pytest
import torch
import yaml
from torch import nn

import qtk

MEAN, STD = torch.tensor([0.0, 1e4, 50.0, 0.001, -3.0, 1e6]), torch.tensor([1.0, 3e3, 20.0, 5e-4, 2.0, 4e5])


class Table(nn.Module):
    """A net on raw columns, which ``scaled`` standardizes; ``extra`` reads them too."""

    def __init__(self, scaled, extra=None, columns=6):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("mean", MEAN[:columns])
        self.register_buffer("std", STD[:columns])
        self.scaled, self.extra = scaled, extra
        self.net = nn.Sequential(nn.Linear(columns, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        y = self.net(self.scaled(self, x))
        return y if self.extra is None else (y, self.extra(x))


def by_quotient(model, x):
    return (x - model.mean) / model.std


def by_product(model, x):
    return x.contiguous() * (1 / model.std) + (-model.mean / model.std)


def by_names(model, x):
    return torch.div(torch.neg(torch.rsub(x, model.mean)), model.std)


def rows(count=64, *, seed=0):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed)) * STD + MEAN


def calibrated(model, data, config):
    sim = qtk.QuantSim(model.eval(), data[0], config=config)
    sim.compute_encodings(data, progress=False)
    return sim


def sqnr_db(model, sim, x):
    expected, found = model.double()(x.double()), sim.model(x)
    model.float()
    return float(10 * (expected.square().sum() / (expected - found).square().sum()).log10())


DATA, UNSEEN = [rows(seed=seed) for seed in range(4)], rows(seed=9).clamp(MEAN - 2 * STD, MEAN + 2 * STD)


@pytest.mark.parametrize("scaled", [by_quotient, by_product])
def test_columns_in_several_units_stay_in_float_until_they_are_alike(scaled):
    model = Table(scaled)
    sim = calibrated(model, DATA, "onnxruntime")
    assert sqnr_db(model, sim, UNSEEN) > 20
    assert "x:input" not in sim.quantizers
    reasons = {site.name: reason for site, reason in sim.plan.unquantized.items()}
    assert re.fullmatch(r"one step of its range is \d+ steps of what constants make of it", reasons["x:input"])
    assert sim.quantizers["div:out" if scaled is by_quotient else "add:out"].encoding.spec.dtype.bits == 8


def test_a_batch_norm_of_raw_columns_is_no_factor_of_the_weights_behind():
    norm = nn.BatchNorm1d(6, eps=1e-12)
    norm.running_mean, norm.running_var = MEAN.clone(), STD.square()
    model = Table(lambda model, x: model.norm(x)).eval()
    model.norm = norm.eval()
    sim = calibrated(model, DATA, "onnxruntime")
    assert sqnr_db(model, sim, UNSEEN) > 20
    assert "norm:out" in sim.quantizers
    assert "x:input" not in sim.quantizers


def test_a_large_offset_is_taken_off_in_float():
    data = [1000 + torch.randn(64, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    model = Table(lambda model, x: x - 1000)
    assert sqnr_db(model, calibrated(model, data, "onnxruntime"), data[0]) > 25


@pytest.mark.parametrize(("scaled", "extra"), [
    (lambda model, x: x * 0.02 - model.mean[:1], None), (lambda model, x: by_quotient(model, x), nn.Softplus())])
def test_columns_that_are_alike_or_that_another_op_reads_are_quantized(scaled, extra):
    sim = calibrated(Table(scaled, extra), DATA, "onnxruntime")
    assert "x:input" in sim.quantizers


def test_an_image_that_is_normalized_in_the_model_is_quantized():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
            self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.conv((x - self.mean) / self.std)

    sim = calibrated(Net(), [torch.rand(2, 3, 8, 8)], "onnxruntime")
    assert {"x:input", "sub:out", "div:out", "mean"} <= set(sim.quantizers)


@pytest.mark.parametrize("scaled", [by_quotient, by_names])
def test_a_target_without_floats_warns_and_the_rules_that_it_shows_hold_the_columns(scaled):
    model = Table(scaled)
    with pytest.warns(UserWarning, match="steps of what constants make of it") as told:
        assert sqnr_db(model, calibrated(model, DATA, "qnn_htp"), UNSEEN) < 10
    (text,) = [str(each.message) for each in told if "make of it" in str(each.message)]
    rules = [yaml.safe_load(rule) for rule in re.findall(r"{match: {path: '\w+'}, output: float}", text)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim = calibrated(model, DATA, {"version": 1, "extends": "qnn_htp", "rules": rules})
    assert sqnr_db(model, sim, UNSEEN) > 20
    reasons = {site.name: reason for site, reason in sim.plan.unquantized.items()}
    assert re.fullmatch("r?sub computes with floats", reasons["mean"])
