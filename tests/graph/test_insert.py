import copy

import pytest
import torch
from torch import fx, nn

from qtk.config.load import load_config
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.site import Site
from qtk.errors import EncodingError
from qtk.graph.insert import drop_sites, insert, quantizer_nodes, remove
from qtk.graph.simulation import Simulation
from qtk.planning.planner import plan
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode
from qtk.workflow.prepare import prepare_model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        left, right = self.a(x), self.b(x)
        return torch.cat([left, right, right], dim=1), right + 1


def planned():
    torch.manual_seed(0)
    prepared = prepare_model(Net().eval(), torch.randn(3, 4))
    config = load_config({"version": 1, "rules": [{"match": {"op": "concat"}, "output": {"bits": 8}}]})
    return prepared, plan(prepared, config, weight_bits=8, activation_bits=8, scheme="min_max")


def listing(model: fx.GraphModule):
    return [(n.op, str(n.target), str(n.args), str(n.kwargs)) for n in model.graph.nodes], sorted(
        name for name, _ in model.named_modules()
    )


def test_remove_is_the_inverse_of_insert():
    model, quant_plan = planned()
    before, code = listing(model), model.code
    insert(model, quant_plan)
    assert listing(model) != before
    remove(model)
    assert listing(model) == before
    assert model.code == code


def test_a_bypassed_model_computes_the_same_bits():
    model, quant_plan = planned()
    x = torch.randn(5, 4)
    before = model(x)
    quantizers = insert(model, quant_plan)
    with in_mode(quantizers.values(), Mode.BYPASS):
        after = model(x)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_each_site_is_called_where_the_plan_says():
    model, quant_plan = planned()
    insert(model, quant_plan)
    targets = [str(node.target).removeprefix("qtk_quantizers.") for node in quantizer_nodes(model)]
    assert sorted(targets) == sorted(
        ["x:input", "a.weight", "b.weight", "b:out", "add:out"] + 4 * ["concat:out"]  # a:out, in[1], in[2], out
    )
    cat = next(node for node in model.graph.nodes if "cat" in str(node.target) and node.op == "call_function")
    assert {str(piece.target) for piece in cat.args[0]} == {"qtk_quantizers.concat:out"}


def test_followers_share_the_leaders_quantizer():
    model, quant_plan = planned()
    by_name = {site.name: quantizer for site, quantizer in insert(model, quant_plan).items()}
    assert by_name["a:out"] is by_name["concat:out"]
    assert by_name["b:out"] is not by_name["concat:out"]


def test_a_foreign_plan_is_refused_and_changes_nothing():
    model, quant_plan = planned()
    before = listing(model)
    decided = next(iter(quant_plan.values()))
    with pytest.raises(EncodingError, match="no such sites: elsewhere:out"):
        insert(model, QuantPlan({Site("elsewhere", "", "out"): SitePlan(decided.spec, "min_max")}))
    assert listing(model) == before


def test_dropping_a_site_takes_its_followers_along():
    model, quant_plan = planned()
    simulation = Simulation(model, quant_plan, insert(model, quant_plan))
    site = next(site for site in quant_plan if site.name == "a:out")
    dropped = drop_sites(simulation, {site: "for the test"})
    smaller = dropped.plan
    assert list(dropped.quantizers) == list(smaller)
    gone = set(quant_plan) - set(smaller)
    assert {site.name for site in gone} == {"a:out", "concat:in[1]", "concat:in[2]", "concat:out"}
    assert all(smaller.unquantized[site] == "for the test" for site in gone)
    assert not any("concat" in str(node.target) for node in quantizer_nodes(model))


def test_inserting_into_a_copy_leaves_the_original_alone():
    model, quant_plan = planned()
    before = listing(model)
    insert(copy.deepcopy(model), quant_plan)
    assert listing(model) == before
