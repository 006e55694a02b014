"""An operator that the table does not know becomes known by a row alone."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import qtk
from qtk.graph.absolute import absolute_values
from qtk.graph.coverage import unknown_ops
from qtk.graph.flow import Flow
from qtk.graph.masks import maskable_sites
from qtk.graph.token_layouts import TokenLayouts
from qtk.graph.value_kinds import ValueKind, value_kinds
from qtk.numerics.token_layout import TokenLayout
from qtk.operators.op_row import Feeding, Mask, OpRow, Precision, Product, Role, Tokens, out_in
from qtk.operators.op_table import ROWS
from qtk.planning.feeds import Feeds

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
    sim = qtk.QuantSim(prepared, batches[0], weight_bits=8)
    sim.compute_encodings(batches, progress=False)
    assert "weight  int8 per_channel(axis=0)" in str(sim.plan)
    assert {"weight", "project:out", "bessel:out"} <= sim.quantizers.keys()
    weight = model.weight.detach()
    scale = torch.maximum(weight.amax(1) / 127, weight.amin(1) / -128)
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


class Bessel(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.fc, self.read = nn.Linear(8, 8), read

    def forward(self, x):
        return self.read(self, x)


def graph_of(read, x, monkeypatch, **columns):
    monkeypatch.setitem(ROWS, "special_i0", replace(I0, **columns))
    return qtk.prepare_model(Bessel(read).eval(), x, verify=False)


def result_of(graph):
    (result,) = graph.graph.output_node().all_input_nodes
    return result


@pytest.mark.parametrize(("counts", "nature"), [(True, ValueKind.COUNT), (False, ValueKind.REAL)])
def test_its_row_says_whether_it_keeps_counts(counts, nature, monkeypatch):
    graph = graph_of(lambda net, x: torch.special.i0((x > 0).float().cumsum(1)), torch.randn(4, 8), monkeypatch,
                     counts=counts)
    assert value_kinds(graph.graph, Flow(graph.graph))[result_of(graph)] is nature


@pytest.mark.parametrize(("mask", "names"), [
    (Mask.NONE, set()), (Mask.KEEPS, {"fc:out", "bessel:out"}), (Mask.READS, {"fc:out"}), (Mask.MAKES, {"bessel:out"}),
])
def test_its_row_says_what_it_does_with_a_mask(mask, names, monkeypatch):
    def read(net, x):
        y = torch.special.i0(net.fc(x))
        return y.softmax(-1) if mask is Mask.KEEPS else y * 2 if mask is Mask.READS else y.relu()

    graph = graph_of(read, torch.randn(4, 8), monkeypatch, mask=mask)
    assert {site.name for site in maskable_sites(graph) if site.name in {"fc:out", "bessel:out"}} == names


@pytest.mark.parametrize(("tokens", "layout"), [
    (Tokens.ELEMENTWISE, "[samples, tokens, 8]"), (Tokens.REORDERED, "aten.special_i0.default"),
    (Tokens.RESHAPED, "[samples, tokens, 8]"), (Tokens.LOOKED_UP, "[samples, tokens, 8, 8]"),
])
def test_its_row_says_where_the_tokens_are_in_its_result(tokens, layout, monkeypatch):
    graph = graph_of(lambda net, x: torch.special.i0(x), torch.randn(2, 5, 8), monkeypatch, tokens=tokens)
    (x,) = graph.graph.find_nodes(op="placeholder")
    layouts = TokenLayouts(graph, {x: TokenLayout.of_shape((2, 5, 8), (False, True, True))})
    assert str(layouts[result_of(graph)]) == layout


def test_its_row_says_whether_a_value_feeds_what_it_feeds(monkeypatch):
    def norms(net, x):
        return nn.functional.layer_norm(torch.special.i0(net.fc(x)), (8,))

    for feeding, names in ((None, {"bessel"}), (Feeding.RESULT, {"bessel", "layer_norm"})):
        graph = graph_of(norms, torch.randn(4, 8), monkeypatch, feeding=feeding)
        fed = Feeds(graph.graph, Flow(graph.graph), {}, {})
        linear = next(node for node in graph.graph.nodes if str(node.target) == "aten.linear.default")
        assert fed.names(linear) == names


def test_its_row_says_which_error_of_its_operand_matters(monkeypatch):
    for precision, found in ((None, False), (Precision.FRACTION, True), (Precision.ABSOLUTE, False)):
        graph = graph_of(lambda net, x: torch.special.i0(net.fc(x)), torch.randn(4, 8), monkeypatch,
                         precision=precision)
        linear = next(node for node in graph.graph.nodes if str(node.target) == "aten.linear.default")
        assert (linear in absolute_values(graph.graph, Flow(graph.graph))) is found


def test_with_its_row_its_values_leave_with_their_encodings(rows, batches, tmp_path):
    sim = qtk.QuantSim(Projects().eval(), batches[0])
    sim.compute_encodings(batches, progress=False)
    sim.export(tmp_path / "files", formats=("encodings", "pt2e"))
    written = (tmp_path / "files" / "encodings.json").read_text()
    assert "bessel:out" in written
    assert json.dumps(sim.encodings()["bessel:out"].scale.item())[:8] in written
    program = torch.export.load(tmp_path / "files" / "model.pt2").module()
    torch.testing.assert_close(program(batches[0]), sim.model(batches[0]))
