"""The graph between torch and ONNX: a marker at every site that is asked for, and the names of the signature."""

import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.export.onnx.marked_graph import DOMAIN, MARKER, trace
from qtk.export.simulated_sites import simulated_sites


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 3, batch_first=True)

    def forward(self, tokens, gain):
        return {"hidden": self.lstm(self.fc(tokens))[0] * gain, "count": tokens.shape[1]}


INPUTS = {"tokens": torch.randn(1, 5, 4), "gain": torch.ones(1, 1, 1)}


@pytest.fixture(scope="module")
def sim():
    sim = qtk.QuantSim(Net().eval(), {name: value.expand(2, -1, -1) for name, value in INPUTS.items()})
    sim.compute_encodings([INPUTS], progress=False)
    return sim


def markers(traced):
    nodes = [node for node in traced.model.graph.all_nodes() if node.domain == DOMAIN]
    assert {node.op_type for node in nodes} <= {MARKER}
    return {node.attributes["site"].as_string() for node in nodes}


@pytest.mark.sample(1)
@pytest.mark.medium
def test_a_marker_for_every_site_names_of_the_signature_and_a_batch_that_may_vary(sim):
    sites = simulated_sites(sim.model)
    code = sim.model.code
    traced = trace(sim.model, sites, INPUTS, opset=21)
    assert markers(traced) == {site.name for site in sites}
    assert sorted(traced.input_names) == ["gain", "tokens"]
    assert traced.output_names == ("hidden",)
    first = traced.model.graph.inputs[traced.input_names.index("tokens")]
    assert not isinstance(first.shape[0], int)
    assert list(first.shape)[1:] == [5, 4]
    assert sim.model.code == code


@pytest.mark.medium
def test_sites_that_are_not_asked_for_have_no_marker_and_without_any_inside_a_layer_is_one_op(sim):
    outside = [site for site in simulated_sites(sim.model) if site.name.startswith("fc")]
    traced = trace(sim.model, outside, INPUTS, opset=21)
    assert markers(traced) == {site.name for site in outside}
    assert "LSTM" in {node.op_type for node in traced.model.graph}


@pytest.mark.medium
def test_what_onnx_does_not_know_is_refused_with_the_cause():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.special.i1(x)

    model = qtk.prepare_model(Odd(), torch.rand(2, 3))
    before = copy.deepcopy(model)
    with pytest.raises(ExportError, match=r"cannot express the model in ONNX: .*bessel_i1"):
        trace(model, [], torch.rand(2, 3), opset=21)
    assert model.code == before.code
