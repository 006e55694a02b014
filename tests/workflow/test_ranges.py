"""Ranges by hand, and calibrating a part."""

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError, EncodingError, NotCalibratedError

BATCHES = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]


@pytest.fixture
def sim():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Linear(5, 2)).eval()
    sim = qtk.QuantSim(model, BATCHES[0])
    sim.compute_encodings(BATCHES, progress=False)
    return sim


def numbers(sim):
    return {name: encoding.scale.tolist() for name, encoding in sim.encodings().items()}


def changed(before, after):
    return {name for name in before if before[name] != after.get(name)}


@pytest.mark.medium
def test_a_range_set_by_hand_holds_and_stays(sim):
    before = numbers(sim)
    sim.set_range("2:out", -3.0, 5.0)
    encoding = sim.encodings()["2:out"]
    assert float(encoding.scale) == pytest.approx(8 / 255)
    assert float(encoding.minimum) == pytest.approx(-3.0, abs=float(encoding.scale) / 2)
    sim.compute_encodings([10 * batch for batch in BATCHES], progress=False)
    assert torch.equal(sim.encodings()["2:out"].scale, encoding.scale)
    assert changed(before, numbers(sim)) == {name for name in before if name.endswith(":out") or name == "input"} | {
        name for name in before if "input" in name
    }
    sim.set_range("2:out", -1.0, 1.0)  # a second time
    assert float(sim.encodings()["2:out"].scale) == pytest.approx(2 / 255)


def test_every_channel_of_a_weight_gets_the_range(sim):
    sim.set_range("2.weight", -1.0, 1.0)
    assert sim.encodings()["2.weight"].scale.tolist() == pytest.approx([1 / 127] * 5)


def test_a_glob_names_many(sim):
    sim.set_range("*:out", 0.0, 1.0)
    assert {round(float(e.scale), 6) for name, e in sim.encodings().items() if name.endswith(":out")} == {
        round(1 / 255, 6)
    }


@pytest.mark.medium
@pytest.mark.parametrize(
    ("site", "low", "high", "said"),
    [
        ("2:output", 0.0, 1.0, r"no site is called '2:output'; did you mean '2:out'"),
        ("2:out", 1.0, 1.0, "low < high"),
        ("2:out", float("nan"), 1.0, "low < high"),
        ("2:out", -float("inf"), 1.0, "finite"),
    ],
)
def test_what_makes_no_sense_changes_nothing(sim, site, low, high, said):
    before = numbers(sim)
    with pytest.raises(CalibrationError, match=said):
        sim.set_range(site, low, high)
    assert numbers(sim) == before
    assert not any(quantizer.frozen for quantizer in sim.quantizers.values())


def test_scales_that_nobody_counted_have_no_range():
    sim = qtk.QuantSim(nn.Linear(4, 6).eval(), BATCHES[0])
    with pytest.raises(CalibrationError, match="the number of its scales is not known yet"):
        sim.set_range("*weight", -1.0, 1.0)


def test_only_the_named_sites_are_calibrated(sim):
    before = numbers(sim)
    sim.compute_encodings([10 * batch for batch in BATCHES], sites=["2:*"], progress=False)
    assert changed(before, numbers(sim)) == {"2:out"}
    with pytest.raises(CalibrationError, match="no site is called"):
        sim.compute_encodings(BATCHES, sites=["nowhere"], progress=False)


def test_what_was_forgotten_is_found_again(sim):
    before = numbers(sim)
    with torch.no_grad():
        sim.model.get_parameter("2.weight").mul_(2)
    sim.forget(["2.weight", "2:out", "3:out"])
    with pytest.raises(NotCalibratedError):
        sim.model(BATCHES[0])
    sim.compute_encodings([5 * batch for batch in BATCHES], only_missing=True, progress=False)
    assert changed(before, numbers(sim)) == {"2.weight", "2:out", "3:out"}
    assert numbers(sim)["2.weight"] == pytest.approx([2 * scale for scale in before["2.weight"]])


@pytest.mark.medium
def test_frozen_ranges_are_neither_computed_nor_forgotten(sim):
    before = numbers(sim)
    sim.freeze(["2:out", "*weight"])
    with pytest.raises(EncodingError, match="frozen"):
        sim.forget()
    assert numbers(sim) == before
    sim.unfreeze("2:out")
    sim.compute_encodings([3 * batch for batch in BATCHES], progress=False)
    assert "2:out" in changed(before, numbers(sim))
    assert not any(name.endswith("weight") for name in changed(before, numbers(sim)))
    sim.freeze()
    assert all(quantizer.frozen for quantizer in sim.quantizers.values())


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("bounds", "low", "high"), [([0.0, None], 0.0, None), ([None, 0.25], None, 0.25), ([-0.5, 0.5], -0.5, 0.5)]
)
@pytest.mark.parametrize("scheme", ["min_max", "tf_enhanced", "percentile"])
def test_bounds_in_a_config_limit_what_data_decide(scheme, bounds, low, high):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).eval()
    config = {"version": 1, "defaults": {"weight": {"symmetric": True}, "activation": {"symmetric": False}},
              "rules": [{"match": {"path": "0"}, "output": {"bounds": bounds}}]}
    free, bound = (
        qtk.QuantSim(model, BATCHES[0], scheme=scheme, config={**config, "rules": rules})
        for rules in ([], config["rules"])
    )
    for own in (free, bound):
        own.compute_encodings(BATCHES, progress=False)
    loose, tight = free.encodings()["0:out"], bound.encodings()["0:out"]
    step = float(tight.scale) * 0.501
    if low is not None:
        assert float(loose.minimum) < low
        assert float(tight.minimum) >= low - step
    if high is not None:
        assert float(loose.maximum) > high
        assert float(tight.maximum) <= high + step
    if low is None or high is None:
        kept = (float(own.minimum if low is None else own.maximum) for own in (loose, tight))
        assert next(kept) == pytest.approx(next(kept), abs=2 * step)
    assert all(torch.equal(free.encodings()[name].scale, bound.encodings()[name].scale)
               for name in free.encodings() if name != "0:out")


def test_numbers_in_brackets_are_part_of_a_name():
    class Twice(nn.Module):
        def forward(self, x):
            return torch.cat([x, x.relu()], 1).chunk(2, 1)

    rule = {"match": {"op": "concat"}, "output": {"bits": 8}}
    sim = qtk.QuantSim(Twice().eval(), BATCHES[0], config={"version": 1, "rules": [rule]})
    names = [name for name in sim.quantizers if "[" in name]
    assert names
    for name in names:
        sim.freeze(name)
        assert sim.quantizers[name].frozen
        sim.unfreeze(name)
    with pytest.raises(CalibrationError, match="no site is called"):
        sim.freeze("*[0-9]")


@pytest.mark.medium
def test_an_optimizer_no_longer_moves_a_learned_range_that_is_frozen_or_set(sim):
    sim.learn_ranges()
    frozen, *_, by_hand = (name for name, quantizer in sim.quantizers.items() if quantizer.learns_range)
    optimizer = torch.optim.Adam(sim.model.parameters(), lr=0.1)

    def step():
        sim.model(BATCHES[0]).square().sum().backward()
        optimizer.step()
        return sim.encodings()

    step()
    sim.freeze(frozen)
    sim.set_range(by_hand, -1, 1)
    before, after = sim.encodings(), step()
    assert {name for name in after if after[name].equals(before[name])} == {frozen, by_hand}


def test_they_are_methods_of_the_simulation(sim):
    sim.set_range("3:out", -1.0, 1.0)
    sim.unfreeze()
    sim.freeze("0.weight")
    assert [name for name, each in sim.quantizers.items() if each.frozen] == ["0.weight"]
    sim.forget("3:out")
    assert "3:out" not in sim.encodings()
