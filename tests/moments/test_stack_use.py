"""The rows that meet each matrix, multiplied with it, against what the op computes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.graph.evaluate import evaluate
from qtk.graph.insert import quantizer_called
from qtk.layerwise.weighted_layers import weighted_layers
from qtk.numerics.im2col import weight_to_gemm
from tests.zoo.experts import grouped_mm_of_transformers

ENDS, INDEX = torch.tensor([2, 2, 7], dtype=torch.int32), torch.tensor([2, 0, 2, 2, 1])

FORMS = {  # shape of the weight, inputs, function, how many matrices
    "batched": ((3, 4, 6), (torch.randn(3, 5, 4),), torch.bmm, 3),
    "broadcast": ((3, 4, 6), (torch.randn(2, 1, 5, 4),), torch.matmul, 3),
    "two axes of matrices": ((2, 3, 4, 6), (torch.randn(2, 3, 5, 4),), torch.matmul, 6),
    "left factor": ((3, 6, 4), (torch.randn(3, 4, 5),), lambda x, w: w @ x, 3),
    "left factor of one": ((6, 4), (torch.randn(2, 4, 5),), lambda x, w: w @ x, 1),
    "baddbmm": ((3, 6, 4), (torch.randn(3, 5, 4),), lambda x, w: torch.baddbmm(torch.zeros(3, 5, 6), x, w.mT), 3),
    "einsum": ((3, 4, 6), (torch.randn(2, 3, 4),), lambda x, w: torch.einsum("bei,eio->beo", x, w), 3),
    "einsum of all experts": ((3, 6, 4), (torch.randn(5, 4),), lambda x, w: torch.einsum("bi,eoi->ebo", x, w), 1),
    "einsum of heads": ((3, 2, 6), (torch.randn(2, 5, 3, 2),), lambda x, w: torch.einsum("bthd,hdo->bto", x, w), 1),
    "einsum with an ellipsis": ((6, 4), (torch.randn(2, 5, 4),), lambda x, w: torch.einsum("...i,oi->...o", x, w), 1),
    "grouped": ((3, 4, 6), (torch.randn(7, 4), ENDS), lambda x, w, e: grouped_mm_of_transformers()(x, w, e), 3),
    "grouped, transposed": (
        (3, 6, 4), (torch.randn(7, 4), ENDS), lambda x, w, e: grouped_mm_of_transformers()(x, w.transpose(1, 2), e), 3),
    "gathered": ((3, 6, 4), (torch.randn(5, 4, 1), INDEX), lambda x, w, i: torch.bmm(w[i], x), 3),
    "gathered by index_select": (
        (3, 6, 4), (torch.randn(5, 2, 4), INDEX), lambda x, w, i: torch.bmm(x, w.index_select(0, i).mT), 3),
    "two moves": ((4, 3, 6), (torch.randn(3, 5, 4),), lambda x, w: torch.bmm(x, w.permute(1, 2, 0).mT), 3),
    "matrices cut out of one": ((4, 18), (torch.randn(3, 5, 4),),
                                lambda x, w: torch.bmm(x, w.view(4, 3, 6).transpose(0, 1)), 3),
    "outputs cut in three": ((9, 4), (torch.randn(2, 5, 4),), lambda x, w: torch.cat(
        [F.linear(each, part) for each, part in zip((x, x + 1, x - 1), w.chunk(3), strict=True)], -1), 3),
    "outputs cut unevenly": ((18, 4), (torch.randn(2, 5, 4),), lambda x, w: torch.cat(
        [F.linear(x, w[:12]), F.linear(x + 1, w[12:])], -1), 3),
    "columns first, cut": ((4, 6), (torch.randn(2, 5, 4),), lambda x, w: torch.cat(
        [x @ w[:, :3], (x + 1) @ w[:, 3:]], -1), 2),
    "whole and cut": ((6, 4), (torch.randn(2, 5, 4),), lambda x, w: torch.cat(
        [F.linear(x, w), F.linear(x + 1, w[3:])], -1), 2),
}


class Form(nn.Module):
    def __init__(self, shape, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(shape)), function

    def forward(self, x, *rest):
        return self.function(x, self.weight, *rest)


@pytest.mark.sample(6)
@pytest.mark.medium
@pytest.mark.parametrize("name", FORMS)
def test_rows_times_matrices_are_what_the_op_computes(name):
    shape, inputs, function, count = FORMS[name]
    model = Form(shape, function).eval()
    sim = qtk.QuantSim(model, inputs, weight_bits=8, activation_bits=None)
    (layer,), skipped = weighted_layers(sim.model, sim.plan)
    assert skipped == {}
    placeholders = sim.model.graph.find_nodes(op="placeholder")
    values = dict(zip(placeholders, inputs, strict=True))
    products = []
    with torch.no_grad():
        for use in layer.uses.values():
            rows = use.rows(lambda node: evaluate(node, values, bypass_quantizers=True))
            matrices = weight_to_gemm(layer.weight, layer.geometry)
            assert len(rows.counts) == len(matrices) == count
            assert quantizer_called(use.root) is layer.quantizer
            products += [each @ matrix.mT for each, matrix in zip(rows, matrices, strict=True)]
        expected = model(*inputs)
    found = torch.cat([each.flatten() for each in products]).sort().values
    torch.testing.assert_close(found, expected.flatten().sort().values, rtol=1e-4, atol=1e-5)
    assert any(use.is_routed for use in layer.uses.values()) == (len(inputs) > 1)


REFUSED = {
    "a part of the columns": ((3, 6, 4), lambda x, w: torch.bmm(x, w[:, :4]), "rearranged"),
    "columns in another order": ((3, 4, 6), lambda x, w: torch.bmm(x, w.flip(1)), "flip"),
    "too many parts": ((34, 4), lambda x, w: F.linear(x, w[:1]) + F.linear(x, w[1:]), "34 outputs"),
    "a stack, cut": ((3, 6, 4), lambda x, w: torch.bmm(x, w[:, :2].mT) + torch.bmm(x, w[:, 2:4].mT), "a stack"),
    "both operands and no result": (
        (3, 4, 6), lambda x, w: torch.einsum("bti,bio,bo->bt", x, w, x.new_ones(3, 6)), "another form"),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_apart_is_left_with_its_reason(name):
    shape, function, reason = REFUSED[name]
    sim = qtk.QuantSim(Form(shape, function).eval(), torch.randn(3, 5, 4), weight_bits=8, activation_bits=None)
    layers, skipped = weighted_layers(sim.model, sim.plan)
    assert layers == []
    assert any(reason in each for each in skipped.values()), skipped
