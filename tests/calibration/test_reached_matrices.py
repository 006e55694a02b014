import warnings

import pytest
import torch

import qtk
from tests.zoo.experts import FusedExperts


@pytest.mark.medium
def test_experts_that_no_data_reach_are_counted_while_calibrating():
    torch.manual_seed(0)
    model = FusedExperts().eval()
    x = torch.randn(64, 16)
    with torch.no_grad():
        expert = model.gate(x).topk(2).indices
    few = x[(expert < 2).all(1)][:2]  # these choose the first two
    assert len(few) == 2
    sim = qtk.QuantSim(model, x, weight_bits=8)
    with pytest.warns(match=r"no row of the data met .* gate_up_proj: 2 of 4 \(2, 3\); down_proj: 2 of 4"):
        sim.compute_encodings([few], progress=False)
    graph = str(sim.model.graph)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="no row of the data")
        sim.compute_encodings([x], progress=False)
    assert str(sim.model.graph) == graph  # what counted is gone
