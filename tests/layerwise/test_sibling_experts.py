"""Which layers are the same layer of several experts."""

import pytest
import torch
from torch import nn

import qtk
from qtk.layerwise.sibling_experts import sibling_experts
from qtk.layerwise.weighted_layers import weighted_layers
from tests.zoo.experts import FusedExperts


class Two(nn.Module):
    """Two mixtures in a row between layers that are in no mixture; experts as wide as they are deep."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (FusedExperts(experts=2, chosen=1).apart() for _ in range(2))
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = self.first(x)
        return self.second(self.query(x) * self.key(x))


class Hit(nn.Module):
    """Experts that Python calls, if any row chose them; one of them has another width."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleDict({
            f"expert_{index}": nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))
            for index, width in enumerate([6, 6, 7])
        })

    def forward(self, x):
        expert, result = self.gate(x).argmax(-1), torch.zeros_like(x)
        for index in expert.unique():
            rows, = torch.where(expert == index)
            result[rows] = self.experts[f"expert_{int(index)}"](x[rows])
        return result


def groups_of(model, x):
    sim = qtk.QuantSim(model.eval(), x, weight_bits=4, activation_bits=None)
    sim.compute_encodings(None, progress=False)
    layers, _ = weighted_layers(sim.model, sim.plan)
    groups = sibling_experts(sim.model, layers)
    return sim, [[layer.name.removesuffix(".weight") for layer in group] for group in groups]


@pytest.mark.slow
def test_layers_of_one_mixture_at_one_place_are_siblings():
    torch.manual_seed(0)
    _, groups = groups_of(Two(), torch.randn(32, 16))
    assert groups == [[f"{mixture}.{layer}.{index}" for index in range(2)]
                      for mixture in ("first", "second") for layer in ("up", "down")]


@pytest.mark.medium
def test_experts_in_a_list_of_a_model_that_stays_python():
    torch.manual_seed(0)
    model = Hit()
    sim, groups = groups_of(model, torch.randn(64, 8))
    assert groups == [[f"experts.expert_{index}.{layer}" for index in range(2)] for layer in (0, 2)]
    with torch.no_grad():
        x = torch.randn(400, 8)
        expert = model.gate(x).argmax(-1)
        data = torch.cat([x[expert != 1], x[expert == 1][:2]])
    weight = sim.model.state_dict()["experts.expert_1.0.weight"]
    before = weight.clone()
    with pytest.warns(match=r"experts.expert_1.0.weight: met 2 rows"):
        report = qtk.apply_gptq(sim, [data], progress=False, options=qtk.LayerwiseOptions(holdout=0.0))
    assert report.pooled.keys() == {"experts.expert_1.0.weight", "experts.expert_1.2.weight"}
    assert [result.reason for result in report.layers] == [None] * 7
    assert not torch.equal(weight, before)
    assert "experts.expert_1.2.weight  by the Gram matrix of all experts' rows: met 2 rows" in str(report)
