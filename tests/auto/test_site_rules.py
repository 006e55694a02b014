"""A rule for one site sets it, on every model of the zoo, whatever kind of value it is."""

import pytest
import torch
from torch import nn

import qtk
from qtk.auto.site_rules import SiteRules
from qtk.config.tensor_setting import TensorSetting
from tests.zoo.models import ZOO
from tests.zoo.prepared import slow_but

QUICK = ("residual", "tied", "gru", "weight_standardised", "gathered_experts", "concatenated", "fused_attention")


@pytest.mark.medium
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", slow_but(ZOO, *QUICK))
def test_a_rule_sets_its_site(name):
    entry = ZOO[name]
    prepared = qtk.prepare_model(entry.model(), entry.inputs(2))
    sim = qtk.QuantSim(prepared, entry.inputs(2))
    rules = SiteRules(sim.simulation)
    assert rules.sites
    for site in rules.sites:
        for setting in ("float", TensorSetting(bits=16)):
            plan = qtk.QuantSim(prepared, entry.inputs(2), config=rules.config(sim.config, [site], setting)).plan
            if setting == "float":
                assert site not in plan
            else:
                assert plan[site].spec.dtype.bits == 16


@pytest.mark.medium
def test_constants_that_are_no_weights_cannot_be_set_alone():
    entry = ZOO["vit"]
    sim = qtk.QuantSim(entry.model(), entry.inputs(2))
    names = [site.name for site in SiteRules(sim.simulation).sites]
    assert "pos_embed" in sim.quantizers
    assert "pos_embed" not in names
    assert "patch.weight" in names


@pytest.mark.medium
def test_what_a_layer_of_a_recurrent_net_quantizes_at_run_time_is_set_with_all_of_it():
    x = torch.randn(5, 2, 4)
    model = nn.LSTM(4, 3, 2).eval()
    sim = qtk.QuantSim(model, x, config="onnxruntime")
    rules = SiteRules(sim.simulation)
    assert rules.steps == ["lstm.l0", "lstm.l1"]
    assert not [site for site in rules.sites if ".l0" in site.name]
    names = rules.names()
    assert names["lstm.l1.projection:in[0]"] == names["lstm.l1.cell.hidden_projection:in[0]"] == "lstm.l1"
    plan = qtk.QuantSim(model, x, config=rules.precise(sim.config, ["lstm.l1"], "float")).plan
    inside = {site.name for site in plan if ".l" in site.name}
    assert inside == {"lstm.l0.projection:in[0]", "lstm.l0.cell.hidden_projection:in[0]"}
