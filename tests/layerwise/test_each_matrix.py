"""A stack of experts against the same experts as layers of their own."""

import pytest
import torch

import qtk
from qtk.numerics.error import decibels
from tests.zoo.experts import FusedExperts


def mixture(**settings):
    torch.manual_seed(0)
    fused = FusedExperts(**settings).eval()
    mix = torch.randn(16, 16) * torch.logspace(0, -1.3, 16)
    return fused, [torch.randn(256, 16) @ mix for _ in range(4)], torch.randn(512, 16) @ mix


CONFIG = {"version": 1, "extends": "default", "rules": [{"match": {"path": "gate"}, "weight": "float"}]}


def simulation(model, data, bits=3, config=CONFIG):
    sim = qtk.QuantSim(model, data[0], weight_bits=bits, activation_bits=None, config=config, dynamic_shapes="all")
    sim.compute_encodings(data, progress=False)
    return sim


@torch.no_grad()
def sqnr_db(sim, model, x):
    expected = model(x)
    return decibels(expected.square().sum(), (expected - sim.model(x)).square().sum())


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("methods", ["gptq", ["seq_mse", "coordinate_descent"], "adaround(iterations=30)"],
                         ids=["gptq", "seq_mse + coordinate_descent", "adaround"])
def test_a_stack_gains_what_its_matrices_gain_as_layers(methods):
    fused, data, fresh = mixture()
    found = []
    for model in (fused, fused.apart()):
        sim = simulation(model, data)
        before = sqnr_db(sim, model, fresh)
        report = qtk.apply_layerwise(sim, data, methods, progress=False)
        found.append((before, sqnr_db(sim, model, fresh)))
    assert [result.name for result in report.layers] == [f"{kind}.{index}.weight" for index in range(4)
                                                         for kind in ("up", "down")]
    (before, after), (before_apart, after_apart) = found
    assert before == pytest.approx(before_apart, abs=0.01)
    assert after > before + 1.5
    assert after == pytest.approx(after_apart, abs=0.3)


@pytest.mark.medium
def test_scales_that_matrices_share_are_searched_for_all_together():
    fused, data, fresh = mixture()
    per_tensor = {**CONFIG, "defaults": {"weight": {"granularity": "per_tensor"}}}
    sim = simulation(fused, data, bits=4, config=per_tensor)
    before = sqnr_db(sim, fused, fresh)
    assert sim.quantizers["down_proj"].scale.numel() == 1
    report = qtk.apply_layerwise(sim, data, ["seq_mse", "gptq"], progress=False)
    assert sim.quantizers["down_proj"].scale.numel() == 1
    assert sqnr_db(sim, fused, fresh) > before + 1
    assert [result.winner.partition(",")[0] for result in report.layers] == ["SeqMse + Gptq"] * 2


@pytest.mark.medium
def test_matrices_that_few_rows_meet_are_rounded_by_all_rows_and_named():
    fused, data, _ = mixture()
    with torch.no_grad():
        fused.gate.weight[3] = 0
        fused.gate.weight[:3] = fused.gate.weight[:3].abs() * 5
    data = [batch.abs() for batch in data]  # the last expert is never among the first two
    fused.chosen = 1
    sim = simulation(fused, data)
    before = sim.model.get_parameter("down_proj").detach().clone()
    with pytest.warns(match=r"gate_up_proj: \d of 4 \(.*3 met 0 rows.*calibrate with more data"):
        qtk.apply_gptq(sim, data, progress=False)
    changed = (sim.model.get_parameter("down_proj") != before).flatten(1).any(1)
    assert bool(changed[3])


@pytest.mark.medium
def test_a_second_method_goes_on_and_the_first_start_is_kept():
    fused, data, fresh = mixture()
    sim = simulation(fused, data)
    qtk.apply_gptq(sim, data, progress=False)
    report = qtk.apply_layerwise(sim, data, "coordinate_descent", options=qtk.LayerwiseOptions(start="present"),
                                 progress=False)
    assert all(result.after <= result.before for result in report.layers)
    again = qtk.apply_gptq(sim, data, options=qtk.LayerwiseOptions(start="float"), progress=False)
    anew = simulation(fused, data)
    first = qtk.apply_gptq(anew, data, progress=False)
    assert [result.after for result in again.layers] == [result.after for result in first.layers]
    assert torch.equal(sim.model(fresh), anew.model(fresh))
