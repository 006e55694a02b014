"""Ranges taken at run time, from the configuration to training: what a user does with them."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError, ConfigError, EncodingError, SpecError
from qtk.export import encodings_json
from qtk.numerics import dynamic

INT8_TOKEN = {"bits": 8, "symmetric": True, "granularity": "per_token"}


def config(activation, *rules, **others):
    return {"version": 1, "defaults": {"activation": activation}, "rules": list(rules), **others}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 5)).eval()


@pytest.fixture
def x():
    return torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1))


def specs(sim):
    return {site.name: str(decided.spec) for site, decided in sim.plan.items()}


def test_no_data_is_needed_and_every_token_has_its_own_range(net, x):
    sim = qtk.QuantSim(net, x, config=config(INT8_TOKEN), weight_bits=None)
    sim.compute_encodings(None)
    with torch.no_grad():
        wild = torch.cat([x, 1000 * x[:1]])
        assert torch.allclose(sim.model(wild)[:3], sim.model(x), atol=1e-5)  # a neighbour's outliers do no harm
    assert sim.encodings() == {}


def test_the_simulation_is_the_formula_at_every_site(net, x):
    sim = qtk.QuantSim(net, x, config=config({"bits": 8, "dynamic": True}), weight_bits=None)
    sim.compute_encodings(None)

    def quantized(value):
        return dynamic.fake_quantize(value, (), 0, 255, False)[0]

    with torch.no_grad():
        value = quantized(x)
        for layer in net:
            value = quantized(layer(value))
        assert torch.equal(sim.model(x), value)


@pytest.mark.slow
def test_the_shipped_target_quantizes_linear_layers_alone(x):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, batch_first=True).eval()
    sim = qtk.QuantSim(model, x, config="dynamic_per_token")
    sim.compute_encodings(None)
    dynamic_sites = {name for name, spec in specs(sim).items() if "dynamic" in spec}
    assert {name.rpartition(":")[2] for name in dynamic_sites} == {"in[0]"}
    assert {specs(sim)[name] for name in dynamic_sites} == {"int8 per_token symmetric dynamic"}
    assert len(dynamic_sites) == 4  # what goes into qkv, the projection, and both layers of the feed-forward
    assert {specs(sim)[name] for name in specs(sim).keys() - dynamic_sites} == {"int8 per_channel(axis=0) symmetric"}
    with torch.no_grad():
        expected = model(x)
        assert float((sim.model(x) - expected).norm() / expected.norm()) < 0.02
    narrow = specs(qtk.QuantSim(model, x, config="dynamic_per_token", weight_bits=4, activation_bits=6))
    assert {spec.split()[0] for spec in narrow.values()} == {"int4", "int6"}
    weights_only = specs(qtk.QuantSim(model, x, config="dynamic_per_token", activation_bits=None))
    assert not any("dynamic" in spec for spec in weights_only.values())


@pytest.mark.medium
def test_a_recurrent_net_finds_its_ranges_step_by_step():
    torch.manual_seed(0)
    model, x = nn.LSTM(6, 8, batch_first=True).eval(), torch.randn(2, 5, 6)
    sim = qtk.QuantSim(model, x, config="dynamic_per_token")
    sim.compute_encodings(None)
    assert sum("dynamic" in spec for spec in specs(sim).values()) == 2
    with torch.no_grad():
        error = (sim.model(x)[0] - model(x)[0]).norm() / model(x)[0].norm()
    assert 0 < float(error) < 0.02


@pytest.mark.medium
def test_it_trains(net, x):
    sim = qtk.QuantSim(net, x, config=config(INT8_TOKEN), weight_bits=4)
    sim.compute_encodings(None)
    sim.model.train()
    target = torch.randn(3, 7, 5)
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (sim.model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("setting", [
    INT8_TOKEN, pytest.param({"bits": 8, "dynamic": True}, marks=pytest.mark.slow),
    pytest.param({"dtype": "fp8_e4m3", "granularity": "per_token"}, marks=pytest.mark.slow),
], ids=str)
def test_compiled_is_eager(net, x, setting):
    torch._dynamo.reset()
    sim = qtk.QuantSim(net, x, config=config(setting), weight_bits=None)
    sim.compute_encodings(None)
    compiled = torch.compile(sim.model, fullgraph=True)
    with torch.no_grad():
        own, eager = compiled(x), sim.model(x)
        assert compiled(x[:0]).shape == (0, 7, 5)
    assert float((own - eager).abs().max() / eager.abs().max()) < 0.02


@pytest.mark.medium
def test_layerwise_methods_see_activations_as_they_are_quantized(net, x):
    of_min_max = {"match": {"path": "*"}, "weight": {"scheme": "min_max"}}
    sim = qtk.QuantSim(net, x, config=config(INT8_TOKEN, of_min_max), weight_bits=4)
    sim.compute_encodings(None)
    before = {name: encoding.scale.clone() for name, encoding in sim.encodings().items()}
    report = qtk.apply_seq_mse(sim, [x], progress=False)
    assert "0.weight" in str(report)
    assert any(not torch.equal(before[name], encoding.scale) for name, encoding in sim.encodings().items())


@pytest.mark.parametrize("data", [lambda *batch: [batch], lambda *batch: None], ids=["data", "example"])
def test_a_mask_is_found(x, data):
    class Masked(nn.Module):
        def forward(self, x, mask):
            return (x + mask).softmax(-1)

    mask = torch.zeros(3, 7, 16).masked_fill(torch.rand(3, 7, 16) < 0.3, -torch.inf)
    sim = qtk.QuantSim(Masked(), (x, mask), config=config({"bits": 8, "dynamic": True}))
    with pytest.raises(CalibrationError, match="NaN"):
        sim.compute_encodings([(x * torch.nan, mask)], progress=False)
    sim.compute_encodings(data(x, mask), progress=False)
    assert {"mask:input", "add:out"} == {site.name for site in sim.plan.unquantized}
    with torch.no_grad():
        assert float((sim.model(x, mask) - (x + mask).softmax(-1)).abs().max()) < 0.02


def test_an_example_of_no_numbers_does_no_harm(net, x):
    sim = qtk.QuantSim(net, x * torch.nan, config=config(INT8_TOKEN))
    sim.compute_encodings(None, progress=False)
    assert {"0.bias", "2.bias"} == {site.name for site in sim.plan.unquantized}
    assert bool(sim.model(x).isfinite().all())


def test_where_only_some_are_dynamic_the_others_need_data(net, x):
    rule = {"match": {"path": "2"}, "output": INT8_TOKEN}
    sim = qtk.QuantSim(net, x, config=config({"bits": 8}, rule))
    with pytest.raises(CalibrationError, match="3 activation sites need calibration data"):
        sim.compute_encodings(None)
    sim.compute_encodings([x], progress=False)
    assert "2:out" not in sim.encodings()
    assert "1:out" in sim.encodings()


def test_concat_shares_nothing(x):
    class Joined(nn.Module):
        def forward(self, x, y):
            return torch.cat((x.relu(), y.tanh()), -1)

    sim = qtk.QuantSim(Joined(), (x, x), config=config({"bits": 8, "dynamic": True}))
    sim.compute_encodings(None)
    assert all(decided.leader is None for decided in sim.plan.values())
    assert {"relu:out", "tanh:out", "concat:out"} <= specs(sim).keys()


def test_constants_stay_in_float(x):
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.randn(16))

        def forward(self, x):
            return x + self.shift

    rule = {"match": {"op": "add"}, "input": INT8_TOKEN}
    assert "add:in[1]" not in specs(qtk.QuantSim(Shifted(), x, config=config({"bits": 8}, rule)))
    sim = qtk.QuantSim(Shifted(), x, config=config(INT8_TOKEN))
    assert "shift" not in specs(sim)
    assert {site.name: why for site, why in sim.plan.unquantized.items()}["shift"].startswith("constant")


@pytest.mark.medium
def test_it_survives_saving_copying_and_plans(net, x, tmp_path):
    sim = qtk.QuantSim(net, x, config=config(INT8_TOKEN))
    sim.compute_encodings(None, progress=False)
    sim.save(tmp_path / "sim")
    loaded = qtk.QuantSim.load(tmp_path / "sim", net, x)
    with torch.no_grad():
        assert torch.equal(loaded.model(x), sim.model(x))
        assert torch.equal(copy.deepcopy(sim.model)(x), sim.model(x))
    assert loaded.plan == sim.plan
    assert "1:out  int8 per_token symmetric dynamic  at run time" in str(sim.plan)


@pytest.mark.medium
def test_the_exported_encodings_list_what_is_dynamic(net, x, tmp_path):
    sim = qtk.QuantSim(net, x, config=config(INT8_TOKEN))
    sim.compute_encodings(None, progress=False)
    with pytest.warns(UserWarning, match="AIMET's schemas hold no dynamic quantization"):
        sim.export(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "encodings.json").read_text())
    assert written["dynamic"]["1:out"] == sim.quantizers["1:out"].spec.to_json()
    assert list(written["dynamic"]) == [name for name, spec in specs(sim).items() if "dynamic" in spec]
    assert list(encodings_json.read(tmp_path / "out" / "encodings.json")) == list(sim.encodings())
    assert not list((tmp_path / "out").glob("*aimet*"))


def test_there_is_no_range_to_set_load_or_learn(net, x):
    sim = qtk.QuantSim(net, x, config=config({"bits": 8, "dynamic": True}), weight_bits=None)
    with pytest.raises(CalibrationError, match="at run time"):
        sim.set_range("1:out", -1.0, 1.0)
    quantizer = sim.quantizers["1:out"]
    with pytest.raises(EncodingError, match="is quantized dynamically"):
        quantizer.learn_range()
    static = qtk.Encoding(qtk.QuantSpec(qtk.dtype("uint8")), torch.ones(1), torch.zeros(1, dtype=torch.int32))
    with pytest.raises(EncodingError, match="is quantized dynamically"):
        quantizer.load_encoding(static)
    with pytest.raises(EncodingError, match="no encoding"):
        qtk.Encoding(quantizer.spec, torch.ones(1), torch.zeros(1, dtype=torch.int32))


def test_the_comparison_has_no_unit_for_errors_of_moving_scales(net, x):
    sim = qtk.QuantSim(net, x, config=config(INT8_TOKEN))
    sim.compute_encodings(None, progress=False)
    errors = {error.site: error for error in sim.compare([x], progress=False)}
    assert math.isnan(errors["1:out"].max_error_scales)
    assert errors["1:out"].sqnr_db > 30
    assert errors["0.weight"].max_error_scales <= 0.5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"defaults": {"weight": {"dynamic": True}}}, "weights and biases do not change at run time"),
        ({"defaults": {"bias": INT8_TOKEN}}, "weights and biases do not change at run time"),
        ({"defaults": {"activation": {"dynamic": True, "range": [0.0, 1.0]}}}, "needs no range"),
        ({"defaults": {"activation": {"dynamic": True, "scheme": "mse"}}}, "needs no scheme"),
        ({"defaults": {"activation": {"dynamic": True, "granularity": "per_channel"}}}, "per_token or per_block"),
        ({"defaults": {"activation": {"dynamic": False, "granularity": "per_token"}}}, "leave one out"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(net, x, given, said):
    with pytest.raises(ConfigError, match=said):
        qtk.QuantSim(net, x, config={"version": 1, **given})


@pytest.mark.medium
@pytest.mark.parametrize(
    ("later", "spec", "how"),
    [
        ({"dynamic": False}, "uint8 per_tensor asymmetric", "min_max"),
        ({"range": [0.0, 1.0]}, "uint8 per_tensor asymmetric", "range (0.0, 1.0)"),
        ({"scheme": "mse"}, "uint8 per_tensor asymmetric", "mse"),
        ({"bits": 4}, "uint4 per_token asymmetric dynamic", "at run time"),
        ({"granularity": "per_tensor"}, "uint8 per_tensor asymmetric dynamic", "at run time"),
    ],
    ids=str,
)
def test_later_rules_win(net, x, later, spec, how):
    rule = {"match": {"op": "gelu"}, "output": later}
    sim = qtk.QuantSim(net, x, config=config({"bits": 8, "granularity": "per_token"}, rule))
    line = next(line for line in str(sim.plan).splitlines() if line.startswith("1:out"))
    assert line.split("  ")[1:3] == [spec, how]


@pytest.mark.medium
def test_rules_that_add_up_to_nonsense_are_refused(net, x):
    rule = {"match": {"op": "gelu"}, "output": {"granularity": "per_channel", "axis": 1}}
    for first in ({"bits": 8, "dynamic": True}, {"bits": 8, "granularity": "per_token"}):
        with pytest.raises(SpecError, match="say dynamic: false"):
            qtk.QuantSim(net, x, config=config(first, rule))


def test_a_rule_may_take_the_range_that_another_fixed(net, x):
    first = {"match": {"op": "gelu"}, "output": {"range": [0.0, 1.0]}, "optional": True}
    second = {"match": {"op": "gelu"}, "output": {"dynamic": True}}
    sim = qtk.QuantSim(net, x, config=config({"bits": 8}, first, second))
    assert specs(sim)["1:out"] == "uint8 per_tensor asymmetric dynamic"
