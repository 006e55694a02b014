"""Against Gram matrices of every expert's input for all tokens, in float64."""

import pytest
import torch
import torch.nn.functional as F

import qtk
from qtk.calls.calls import Call
from qtk.errors import CalibrationError
from qtk.layerwise.walk import walk
from qtk.layerwise.weighted_layers import weighted_layers
from qtk.moments.required_statistics import RequiredStatistics
from tests.zoo.experts import FusedExperts, GatheredExperts

STATISTICS = RequiredStatistics(dtype=torch.float64)


def collected(model, batches, **settings):
    """The statistics of each layer, by name."""
    sim = qtk.QuantSim(model.eval(), batches[0], weight_bits=8, activation_bits=None)
    sim.compute_encodings(None, progress=False)
    layers, _ = weighted_layers(sim.model, sim.plan)
    calls = [Call((x,), {}, None) for x in batches]
    return {each.layer.name: each.moments
            for each in walk(sim.model, calls, dict.fromkeys(layers, STATISTICS), inputs="symfp", **settings)}


def per_row(moments, group=0):
    """The Gram matrix of an expert by the number of its rows, however often each is counted."""
    return moments.gram[group, 0] / torch.as_tensor(moments.rows_of_groups).reshape(-1)[group if moments.counts else 0]


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("chosen", [1, 2, 3])
@pytest.mark.parametrize("form", ["stacked", "separate"])
def test_every_expert_sees_every_token(form, chosen):
    torch.manual_seed(0)
    fused = FusedExperts(chosen=chosen)
    fused.gate.weight.data[3] = 0  # chosen by few
    batches = [torch.randn(40, 16).abs() for _ in range(2)]
    found = collected(fused if form == "stacked" else fused.apart(), batches, all_experts=True)
    x = torch.cat(batches).double()
    for index in range(4):
        gate, up = (x @ fused.gate_up_proj[index].double().mT).chunk(2, -1)
        for name, rows in (("up", x), ("down", F.silu(gate) * up)):
            moments = found[f"{name}.{index}.weight"] if form == "separate" else found[
                {"up": "gate_up_proj", "down": "down_proj"}[name]]
            torch.testing.assert_close(per_row(moments, index if form == "stacked" else 0), rows.mT @ rows / len(x),
                                       rtol=1e-4, atol=1e-4)


@pytest.mark.medium
def test_what_follows_the_experts_is_as_the_router_chose():
    torch.manual_seed(0)
    model, batches = GatheredExperts(), [torch.randn(40, 16) for _ in range(2)]
    routed, everywhere = (collected(model, batches, all_experts=each) for each in (False, True))
    assert everywhere["up"].counts == (80,) * 4
    assert min(routed["up"].counts) < 80
    for name in ("router.weight", "head.weight"):
        assert torch.equal(routed[name].gram, everywhere[name].gram)


@pytest.mark.medium
def test_the_option_is_that_of_a_run_and_without_experts_an_error():
    torch.manual_seed(0)
    fused, batches = FusedExperts(chosen=1), [torch.randn(64, 16).abs() for _ in range(2)]
    fused.gate.weight.data[3] = -1  # chosen by none
    options = qtk.LayerwiseOptions(calibrate_all_experts=True)
    sim = qtk.QuantSim(fused.eval(), batches[0], weight_bits=4, activation_bits=None)
    report = qtk.apply_gptq(sim, batches, progress=False, options=options)
    assert not report.pooled
    assert [result.reason for result in report.layers] == [None] * 3
    assert report.layers[-1].sqnr_db is None  # its error is over all tokens, its output that of the router's choice
    sim = qtk.QuantSim(torch.nn.Linear(4, 4), torch.randn(8, 4), weight_bits=4)
    with pytest.raises(CalibrationError, match="calibrate_all_experts: the rows of no layer are chosen by a router"):
        qtk.apply_gptq(sim, [torch.randn(8, 4)], progress=False, options=options)
