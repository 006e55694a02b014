"""An operator that the table does not know becomes known by a row alone."""

import pytest
import torch
from torch import nn

import qtk
from qtk.graph.op_axes import out_in
from qtk.graph.op_row import OpRow, Product, Role
from qtk.graph.op_table import ROWS
from qtk.graph.unknown_ops import unknown_ops

PROJECT = "qtk_tests::project"


@torch.library.custom_op(PROJECT, mutates_args=())
def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()


@project.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


class Projects(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 6)
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        return project(torch.special.i0(self.first(x)), self.weight)


ROW = OpRow("project", Role.COMPUTE, inputs=(0,), weights=(1,), weight_axes=out_in, product=Product.OUT_IN)
I0 = OpRow("bessel", Role.COMPUTE)


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, 8, generator=generator) for _ in range(4)]


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setitem(ROWS, PROJECT, ROW)
    monkeypatch.setitem(ROWS, "special_i0", I0)


@pytest.mark.medium
def test_without_its_row_an_operator_is_named_and_left_in_float(batches):
    prepared = qtk.prepare_model(Projects().eval(), batches[0])
    assert unknown_ops(prepared) == ("aten.special_i0.default", "qtk_tests.project.default")
    sim = qtk.QuantSim(prepared, batches[0])
    assert "weight" not in sim.quantizers


def test_with_its_row_it_is_planned_and_calibrated(rows, batches):
    model = Projects().eval()
    prepared = qtk.prepare_model(model, batches[0])
    assert unknown_ops(prepared) == ()
    sim = qtk.QuantSim(prepared, batches[0], weight_bits=4)
    sim.compute_encodings(batches, progress=False)
    assert "weight  int4 per_channel(axis=0)" in str(sim.plan)
    assert {"weight", "project:out", "bessel:out"} <= sim.quantizers.keys()
    weight = model.weight.detach()
    scale = torch.maximum(weight.amax(1) / 7, weight.amin(1) / -8)
    torch.testing.assert_close(sim.encodings()["weight"].scale.flatten(), scale)


def test_with_its_row_layer_wise_methods_improve_its_weight(rows, batches):
    model = Projects().eval()
    sim = qtk.QuantSim(model, batches[0], weight_bits=2, activation_bits=None)
    sim.compute_encodings(None, progress=False)
    x = torch.cat(batches)

    def error():
        return (sim.model(x) - model(x)).square().mean().item()

    before = error()
    report = qtk.apply_gptq(sim, batches, progress=False)
    assert "weight" in [layer.name for layer in report.layers]
    assert error() < before


def test_rules_of_a_config_match_the_family_of_a_row(monkeypatch, batches):
    monkeypatch.setitem(ROWS, PROJECT, OpRow("project", Role.COMPUTE, family="linear", inputs=(0,), weights=(1,),
                                             weight_axes=out_in, product=Product.OUT_IN))
    config = {"version": 1, "rules": [{"match": {"op": "linear"}, "weight": {"bits": 3}}]}
    sim = qtk.QuantSim(Projects().eval(), batches[0], config=config)
    assert sim.quantizers["weight"].spec.dtype.bits == 3
