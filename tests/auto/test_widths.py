"""What widths cost: tables by choices, against sums written out."""

import numpy as np
import torch
from torch import nn

import qtk
from qtk.auto.matrix_products import matrix_products
from qtk.auto.widths import bit_operations, in_pairs, members, quantized_bytes, single, weights_of
from qtk.graph.footprint import footprint


def calibrated(**options):
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), x, **options)
    sim.compute_encodings([x], progress=False)
    return sim, matrix_products(sim.simulation, lambda: sim.model(x))


def test_members_are_what_is_not_settled():
    sim, _ = calibrated()
    names = [each.name for each in members(sim.simulation, only_weights=False)]
    assert names == ["input:input", "0.weight", "1:out", "2.weight", "2:out"]
    sim.freeze("2.weight")
    sim.learn_ranges("1:out")
    assert [each.name for each in members(sim.simulation, only_weights=False)] == ["input:input", "0.weight", "2:out"]
    assert [each.name for each in members(sim.simulation, only_weights=True)] == ["0.weight"]


def test_bit_operations_are_multiplications_times_both_widths():
    sim, products = calibrated()
    listed = members(sim.simulation, only_weights=False)
    costs = in_pairs(products, listed, (4, 8, "float"), sim.plan, bit_operations)
    widths = {"input:input": 8, "0.weight": 4, "1:out": 32, "2.weight": 8, "2:out": 4}
    picks = [(4, 8, 32).index(widths[each.name]) for each in listed]
    assert costs.of(picks) == 5 * 8 * 16 * (8 * 4) + 5 * 16 * 4 * (32 * 8)


def test_operands_that_are_no_members_have_the_width_of_the_plan():
    sim, products = calibrated(activation_bits=6)
    listed = members(sim.simulation, only_weights=True)
    costs = in_pairs(products, listed, (4, 8), sim.plan, bit_operations)
    assert costs.of([0, 1]) == 5 * 8 * 16 * (6 * 4) + 5 * 16 * 4 * (6 * 8)
    assert in_pairs(products, [], (4, 8), sim.plan, bit_operations).fixed == (5 * 8 * 16 + 5 * 16 * 4) * 6 * 8


def test_a_product_of_a_value_with_itself_depends_on_one_width():
    class Gram(nn.Module):
        def forward(self, x):
            x = x.relu()
            return x @ x.mT

    x = torch.randn(5, 8)
    sim = qtk.QuantSim(Gram().eval(), x)
    sim.compute_encodings([x], progress=False)
    listed = members(sim.simulation, only_weights=False)
    products = matrix_products(sim.simulation, lambda: sim.model(x))
    (term,) = in_pairs(products, listed, (4, 8), sim.plan, bit_operations).terms
    assert term.costs.tolist() == [5 * 5 * 8 * 16, 5 * 5 * 8 * 64]


def test_bytes_of_members_and_the_rest_are_the_footprint():
    sim, _ = calibrated(weight_bits=4)
    listed = members(sim.simulation, only_weights=False)
    sizes = quantized_bytes(sim.simulation, listed)
    assert dict(zip([each.name for each in listed], sizes, strict=True)) == {
        "input:input": 0, "0.weight": 8 * 16 / 2 + 16 * 4, "1:out": 0, "2.weight": 16 * 4 / 2 + 4 * 4, "2:out": 0}
    assert footprint(sim.model).quantized_bytes == sum(sizes) + (16 + 4) * 4
    shapes = [[tuple(each.shape) for each in of] for of in weights_of(sim.simulation, listed)]
    assert shapes == [[], [(16, 8)], [], [(4, 16)], []]


def test_single_costs_are_summed():
    assert single([[1.0, 2.0], [10.0, 20.0]], 100.0).of([1, 0]) == 112.0
    assert np.array_equal(single([[1.0, 2.0]], 0.0).terms[0].costs, [1.0, 2.0])
