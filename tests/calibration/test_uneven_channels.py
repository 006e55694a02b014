"""Inputs in several units, or with a large offset, against the float model, whatever brings them into one range."""

import re
import warnings

import pytest
import torch
import yaml
from torch import nn

import qtk
from qtk.calibration.uneven_channels import FEWEST_VALUES, ChannelRanges, front_axes
from qtk.core.site import Site
from qtk.numerics.error import sqnr_db

MEAN, STD = torch.tensor([40.0, 36000.0, 0.005]), torch.tensor([15.0, 20000.0, 0.003])


class Raw(nn.Module):
    """A net of three raw columns, or of steps of these, which ``scaled`` brings into one range."""

    def __init__(self, scaled):
        super().__init__()
        torch.manual_seed(0)
        self.scaled = scaled
        if "bn" in scaled.__code__.co_names:
            self.bn = nn.BatchNorm1d(3, eps=1e-12)
            self.bn.running_mean.copy_(MEAN)
            self.bn.running_var.copy_(STD.square())
        else:
            self.register_buffer("mean", MEAN.clone())
            self.register_buffer("std", STD.clone())
        self.net = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.net(self.scaled(self, x))


def rows(seed, shape=(64, 3)):
    return MEAN + STD * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).clamp(-2, 2)


def window(model, x):
    own = x.std(1, keepdim=True)
    return ((x - x.mean(1, keepdim=True)) / own.clamp(min=1e-6)).clamp(-5, 5)


ROWS = {
    "batch norm of a slice": lambda model, x: model.bn(x[:, :3]),
    "batch norm of a clamp": lambda model, x: model.bn(x.clamp(min=0)),
    "batch norm behind where": lambda model, x: model.bn(torch.where(x > 1e9, 0.0, x)),
    "batch norm of parts joined": lambda model, x: model.bn(torch.cat([x[:, :1], x[:, 1:]], 1)),
    "constants, of a slice": lambda model, x: (x[:, :3] - model.mean) / model.std,
    "constants, a column each": lambda model, x: torch.cat(
        [(x[:, i:i + 1] - model.mean[i]) / model.std[i] for i in range(3)], 1),
    "numbers, a column each": lambda model, x: torch.stack(
        [(x[:, 0] - 40) / 15, (x[:, 1] - 36000) / 20000, (x[:, 2] - 0.005) / 0.003], 1),
}
STEPS = {"batch norm of steps": lambda model, x: model.bn(x.transpose(1, 2)).transpose(1, 2), "window": window,
         "layer norm over time": lambda model, x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-9)}


def calibrated(scaled, config, shape):
    sim = qtk.QuantSim(Raw(scaled).eval(), rows(0, shape), config=config)
    sim.compute_encodings([rows(seed, shape) for seed in range(4)], progress=False)
    return sim


@pytest.mark.parametrize("scaled", [*ROWS, *STEPS])
def test_columns_keep_their_digits_until_they_are_in_one_range(scaled):
    shape, code = ((64, 3), ROWS[scaled]) if scaled in ROWS else ((16, 20, 3), STEPS[scaled])
    sim, model, x = calibrated(code, "onnxruntime", shape), Raw(code).eval(), rows(9, shape)
    assert sqnr_db(model(x).detach(), sim.model(x).detach()) > 25
    assert "net.0.weight" in sim.quantizers


@pytest.mark.parametrize("scaled", ["batch norm of a clamp", "batch norm behind where"])
def test_a_target_in_integers_names_them(scaled):
    with pytest.warns(UserWarning, match=r"x:input .*fills .* of its range"):
        calibrated(ROWS[scaled], "default", (64, 3))


def test_a_layer_reads_columns_in_one_range():
    sim = calibrated(lambda model, x: x + 0 * model.mean, "onnxruntime", (64, 3))
    assert "x:input" in sim.quantizers


def test_a_file_has_the_digits(tmp_path):
    sim = calibrated(ROWS["batch norm of a slice"], "onnxruntime", (64, 3))
    sim.export(tmp_path, formats=("onnx",), progress=False)
    assert sim.verify_export(tmp_path, [rows(9)], turns=0).level.name == "GREEN"


def test_ranges_of_channels_over_several_batches():
    site, x = Site("x", "", "input"), torch.randn(FEWEST_VALUES, 3, 1)
    ranges = ChannelRanges({site: (1, 2)})
    for half in x.chunk(2):
        assert 1 not in ranges.known(site)
        ranges.keep(site, half)
    known = ranges.known(site)
    for axis, others in ((1, (0, 2)), (2, (0, 1))):
        torch.testing.assert_close(known[axis], (x.amin(others), x.amax(others)), rtol=0, atol=0)


MEANS, STDS = torch.tensor([0.0, 1e4, 50.0, 0.001, -3.0, 1e6]), torch.tensor([1.0, 3e3, 20.0, 5e-4, 2.0, 4e5])


class Table(nn.Module):
    """A net on raw columns, which ``scaled`` standardizes; ``extra`` reads them too."""

    def __init__(self, scaled, extra=None, columns=6):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("mean", MEANS[:columns])
        self.register_buffer("std", STDS[:columns])
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


def table_rows(count=64, *, seed=0):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed)) * STDS + MEANS


def calibrated_on(model, data, config):
    sim = qtk.QuantSim(model.eval(), data[0], config=config)
    sim.compute_encodings(data, progress=False)
    return sim


def loss_db(model, sim, x):
    expected, found = model.double()(x.double()), sim.model(x)
    model.float()
    return sqnr_db(expected.detach(), found.detach().double())


DATA = [table_rows(seed=seed) for seed in range(4)]
UNSEEN = table_rows(seed=9).clamp(MEANS - 2 * STDS, MEANS + 2 * STDS)


@pytest.mark.parametrize("scaled", [by_quotient, by_product])
def test_columns_in_several_units_stay_in_float_until_they_are_alike(scaled):
    model = Table(scaled)
    sim = calibrated_on(model, DATA, "onnxruntime")
    assert loss_db(model, sim, UNSEEN) > 20
    assert "x:input" not in sim.quantizers
    reasons = {site.name: reason for site, reason in sim.plan.unquantized.items()}
    assert re.fullmatch(r"a channel of it fills \S+ of its range", reasons["x:input"])
    assert sim.quantizers["div:out" if scaled is by_quotient else "add:out"].encoding.spec.dtype.bits == 8


def test_a_batch_norm_of_raw_columns_is_no_factor_of_the_weights_behind():
    norm = nn.BatchNorm1d(6, eps=1e-12)
    norm.running_mean, norm.running_var = MEANS.clone(), STDS.square()
    model = Table(lambda model, x: model.norm(x)).eval()
    model.norm = norm.eval()
    sim = calibrated_on(model, DATA, "onnxruntime")
    assert loss_db(model, sim, UNSEEN) > 20
    assert "norm:out" in sim.quantizers
    assert "x:input" not in sim.quantizers


def test_a_large_offset_is_taken_off_in_float():
    data = [1000 + torch.randn(64, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    model = Table(lambda model, x: x - 1000)
    assert loss_db(model, calibrated_on(model, data, "onnxruntime"), data[0]) > 25


def test_what_another_op_makes_of_them_keeps_its_digits_too():
    sim = calibrated_on(Table(by_quotient, nn.Softplus()), DATA, "onnxruntime")
    assert not {"x:input", "softplus:out"} & set(sim.quantizers)


@pytest.mark.parametrize("extra", [nn.Linear(6, 2), lambda x: x @ x.mT])
def test_columns_that_a_layer_reads_are_quantized(extra):
    assert "x:input" in calibrated_on(Table(by_quotient, extra), DATA, "onnxruntime").quantizers


def test_an_image_that_is_normalized_in_the_model_is_quantized():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
            self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.conv((x - self.mean) / self.std)

    sim = calibrated_on(Net(), [torch.rand(2, 3, 8, 8)], "onnxruntime")
    assert {"x:input", "sub:out", "div:out", "mean"} <= set(sim.quantizers)


@pytest.mark.parametrize("scaled", [by_quotient, by_names])
def test_a_target_without_floats_warns_and_the_rules_that_it_shows_hold_the_columns(scaled):
    model = Table(scaled)
    with pytest.warns(UserWarning, match="of its range") as told:
        assert loss_db(model, calibrated_on(model, DATA, "qnn_htp"), UNSEEN) < 10
    (text,) = [str(each.message) for each in told if "of its range" in str(each.message)]
    rules = [yaml.safe_load(rule) for rule in re.findall(r"{match: {path: '\w+'}, output: float}", text)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim = calibrated_on(model, DATA, {"version": 1, "extends": "qnn_htp", "rules": rules})
    assert loss_db(model, sim, UNSEEN) > 20
    reasons = {site.name: reason for site, reason in sim.plan.unquantized.items()}
    assert re.fullmatch("r?sub computes with floats", reasons["mean"])


def test_sizes_of_an_input_lead_to_no_value():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm, self.token = nn.Linear(8, 8), nn.LayerNorm(8), nn.Parameter(torch.randn(1, 1, 8))

        def forward(self, x):
            tokens = self.token.expand(x.shape[0], -1, -1) * 2
            return self.norm(self.layer(x * 2) + tokens)

    sim = qtk.QuantSim(Tokens().eval(), torch.randn(4, 3, 8))
    assert {site.name for site in front_axes(sim.simulation, set(sim.simulation.plan))} == {"x:input", "mul_1:out"}
