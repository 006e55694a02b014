import copy
import gc

import pytest
import torch
from torch import nn

import qtk
from qtk.graph import weight_quantizers
from qtk.graph.insert import remove
from qtk.graph.weight_quantizers import weight_requests
from qtk.quantizers.modes import caching
from qtk.quantizers.quantizer import Mode


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.tied, self.scaled = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x):
        x = self.tied(self.first(x).relu())
        return self.lstm(nn.functional.linear(x, self.scaled.weight * 2))[0]


@pytest.fixture
def sim(monkeypatch):
    monkeypatch.setattr(weight_quantizers, "shares_launches", lambda device: True)
    x = torch.randn(3, 2, 4)
    made = qtk.QuantSim(Net().eval(), x)
    made.compute_encodings([x], progress=False)
    return made


def requested(sim):
    return [request.weight for request in weight_requests(sim.model)]


def names(sim):
    own = {id(weight): name for name, weight in sim.model.named_parameters()}
    return sorted(own[id(weight)] for weight in requested(sim))


@pytest.mark.medium
def test_they_are_those_of_parameters_as_these_are_now(sim):
    expected = ["first.weight", "lstm.weight_hh_l0", "lstm.weight_ih_l0"]  # no product, a shared one once
    assert names(sim) == expected
    sim.model.first.weight = sim.model.tied.weight = nn.Parameter(torch.ones(4, 4))
    assert names(sim) == expected


@pytest.mark.medium
def test_only_what_is_simulated_by_a_fixed_range_and_not_cached(sim):
    count = len(requested(sim))
    assert count > 0
    quantizer = next(each for site, each in sim.quantizers.items() if str(site) in ("first.weight", "tied.weight"))
    with caching(sim.model):
        with torch.no_grad():
            assert requested(sim) == []
        assert len(requested(sim)) == count
    for mode in (Mode.OBSERVE, Mode.BYPASS):
        quantizer.mode = mode
        assert len(requested(sim)) == count - 1
    quantizer.mode = Mode.SIMULATE
    quantizer.momentum = 0.5
    assert len(requested(sim)) == count - 1
    quantizer.momentum = None
    sim.learn_ranges("*")
    assert requested(sim) == []


@pytest.mark.medium
def test_nothing_where_launches_are_not_shared(sim, monkeypatch):
    monkeypatch.setattr(weight_quantizers, "shares_launches", lambda device: device.type == "cuda")
    assert requested(sim) == []


@pytest.mark.medium
def test_an_edited_graph_is_read_anew_and_a_deleted_one_is_not_kept(sim):
    assert requested(sim)
    copied = copy.deepcopy(sim.model)
    remove(copied)
    assert list(weight_requests(copied)) == []
    assert requested(sim)
    gc.collect()
    count = len(weight_quantizers._PLACES)
    del copied
    gc.collect()
    assert len(weight_quantizers._PLACES) == count - 1
