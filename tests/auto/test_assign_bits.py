"""qtk.assign_bits: a simulation like any other, a config that plans the same; nothing changed where it fails."""

import pytest
import torch
import yaml

import qtk
from qtk.auto.widths import members
from qtk.errors import CalibrationError, ConfigError
from tests.auto.three_layers import BATCHES, assigned, error, mlp, widths
from tests.zoo.models import ZOO
from tests.zoo.prepared import simulated, slow_but


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("config", ["default", "onnxruntime", {"version": 1, "rules": [
    {"match": {"path": "0"}, "weight": {"bits": 6}}]}])
@pytest.mark.parametrize("options", [{}, {"weight_bits": 5, "activation_bits": 7}])
def test_the_saved_config_plans_the_same(config, options, tmp_path):
    sim, found = assigned({"weight_bits": 7.0}, config=config, choices=(4, 8, "float"), **options)
    path = tmp_path / "widths.yaml"
    found.save(path)
    again = qtk.QuantSim(mlp(), BATCHES[0], config=path)
    assert widths(again) == widths(sim)
    again.compute_encodings(BATCHES, progress=False)
    assert error(again) == pytest.approx(error(sim), rel=1e-6)
    if isinstance(config, str):
        assert yaml.safe_load(path.read_text())["extends"] == config
    with pytest.raises(qtk.QtkError, match="force=True"):
        found.save(path)


@pytest.mark.medium
def test_settled_sites_stay_as_they_are():
    sim = qtk.QuantSim(mlp(), BATCHES[0])
    sim.compute_encodings(BATCHES, progress=False)
    sim.set_range("1:out", low=0.0, high=2.0)
    sim.freeze(["1:out", "0.weight"])
    before = {name: sim.encodings()[name] for name in ("1:out", "0.weight")}
    found = qtk.assign_bits(sim, BATCHES, budget={"bit_operations": 1e9}, progress=False)
    assert not {"1:out", "0.weight"} & {row.name for row in found.rows}
    assert all(sim.encodings()[name].equals(encoding) for name, encoding in before.items())


@pytest.mark.medium
def test_what_is_left_is_a_simulation_like_any_other(tmp_path):
    sim, _ = assigned({"weight_bits": 6.0})
    sim.save(tmp_path / "saved")
    again = qtk.QuantSim.load(tmp_path / "saved", mlp(), BATCHES[0])
    assert torch.equal(again.model(BATCHES[0]), sim.model(BATCHES[0]))
    sim.compute_encodings(BATCHES, progress=False)
    qtk.apply_seq_mse(sim, BATCHES, progress=False)


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(ZOO, "residual", "gru", "vit"))
def test_any_model(name):
    entry = ZOO[name]
    sim = simulated(name)

    def forward(model, size):
        return entry.run(model, size)

    def run():
        return qtk.assign_bits(sim, [2, 3 if entry.dynamic else 2], budget={"weight_bits": 6.0}, forward=forward,
                               choices=(4, 8), progress=False)

    if not members(sim.simulation, only_weights=True):
        with pytest.raises(CalibrationError, match="no site can have a width of its own"):
            run()
    else:
        assert run().cost <= 6.0
    sim.check()


@pytest.mark.medium
@pytest.mark.parametrize(("budget", "message"), [
    ({}, "one limit"), ({"bytes": 1e6, "weight_bits": 4}, "one limit"), ({"byte": 1e6}, "did you mean 'bytes'"),
    ({"bytes": 0}, "positive"), ({"bytes": float("nan")}, "positive"), ({"weight_bits": -1}, "positive"),
])
def test_budgets_that_are_none(budget, message):
    with pytest.raises(ConfigError, match=message):
        assigned(budget)


@pytest.mark.medium
@pytest.mark.parametrize(("choices", "message"), [((8,), "two widths"), ((4, 64), "got 64"), ((4, 1), "got 1")])
def test_choices_that_are_none(choices, message):
    with pytest.raises(ConfigError, match=message):
        assigned({"weight_bits": 6}, choices=choices)


def failing(output, batch):
    raise RuntimeError("no labels")


@pytest.mark.medium
@pytest.mark.parametrize("options", [{"budget": {"weight_bits": 3.0}}, {"budget": {"bytes": 2e3}, "loss": failing}])
def test_nothing_has_changed_after_an_error(options):
    sim = qtk.QuantSim(mlp(), BATCHES[0])
    sim.compute_encodings(BATCHES, progress=False)
    plan, output = str(sim.plan), sim.model(BATCHES[0])
    with pytest.raises((CalibrationError, RuntimeError)):
        qtk.assign_bits(sim, BATCHES, progress=False, **options)
    assert str(sim.plan) == plan
    assert torch.equal(sim.model(BATCHES[0]), output)


def test_without_data():
    with pytest.raises(CalibrationError, match="at least 1 batch"):
        qtk.assign_bits(qtk.QuantSim(mlp(), BATCHES[0]), [], budget={"weight_bits": 6}, progress=False)
