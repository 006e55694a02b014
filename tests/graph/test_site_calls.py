import torch
from torch import nn

import qtk
from qtk.core.plan import leaders
from qtk.graph.site_calls import SiteCalls


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.cat([self.a(x), self.b(x).relu()], 1))


def test_each_site_that_shares_a_quantizer_is_told_in_its_order_again_and_again():
    sim = qtk.QuantSim(Joined().eval(), torch.randn(3, 4))
    quantizers = {site: sim.simulation.quantizers[site] for site in leaders(sim.plan)}
    calls, seen = SiteCalls(sim.simulation, quantizers), []
    for quantizer in quantizers.values():
        quantizer.register_forward_hook(lambda quantizer, *_: seen.append(calls.site_of_next(quantizer).name))
    sim.compute_encodings([torch.randn(3, 4)], progress=False)
    seen.clear()
    with calls.followed():
        sim.model(torch.randn(3, 4))
        sim.model(torch.randn(3, 4))
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    assert {"a:out", "relu:out", "concat:out"} <= set(seen)
    assert len(set(seen)) == len(seen) // 2
    assert {site.name for site in calls.sites} == set(seen)
