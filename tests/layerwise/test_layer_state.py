"""Weights, and the scales they go by, as matrices; against spreading scales over the weight by repeating them."""

import pytest
import torch

from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import WHOLE, PerBlock, PerChannel, PerTensor
from qtk.core.spec import QuantSpec
from qtk.layerwise.layer_state import columns_per_scale, expand_scales, scale_index_of
from qtk.numerics.im2col import Geometry, gemm_to_weight, weight_to_gemm
from tests.layerwise.layers import CHANNEL, LAYERS, blocks_of, everywhere, named

LINEAR = Geometry.linear()
CONV = Geometry((3, 3), (1, 1), (0, 0), (1, 1))
GROUPED = Geometry((3, 3), (1, 1), (0, 0), (1, 1), 2)
TURNED = Geometry((3, 3), (2, 2), (0, 0), (1, 1), 2, True)
CASES = {  # geometry, shape of the weight, granularity, block
    "tensor": (LINEAR, (6, 8), PerTensor(), 8),
    "channel": (LINEAR, (6, 8), PerChannel(0), 8),
    "input axis": (LINEAR, (6, 8), PerChannel(1), 1),
    "blocks": (LINEAR, (6, 8), PerBlock((1, 4)), 4),
    "blocks of rows too": (LINEAR, (6, 8), PerBlock((2, 4)), 4),
    "turned linear": (Geometry((), (), (), (), transposed=True), (8, 6), PerBlock((4, 1)), 4),
    "conv, tensor": (CONV, (6, 4, 3, 3), PerTensor(), 36),
    "conv, channel": (CONV, (6, 4, 3, 3), PerChannel(0), 36),
    "conv, input axis": (CONV, (6, 4, 3, 3), PerChannel(1), 9),
    "conv, blocks": (CONV, (6, 4, 3, 3), PerBlock((1, 2, WHOLE, WHOLE)), 18),
    "conv, rows of the kernel": (CONV, (6, 4, 3, 3), PerBlock((1, 1, 1, 3)), 3),
    "grouped, blocks": (GROUPED, (6, 4, 3, 3), PerBlock((1, 2, WHOLE, WHOLE)), 18),
    "turned, channel": (TURNED, (4, 3, 3, 3), PerChannel(1), 18),
    "turned, input axis": (TURNED, (4, 3, 3, 3), PerChannel(0), 9),
    "turned, blocks": (TURNED, (4, 3, 3, 3), PerBlock((2, 1, WHOLE, WHOLE)), 18),
}


def encoding_of(shape, granularity):
    spec = QuantSpec(dtype("int4"), granularity, symmetric=True)
    count = torch.arange(torch.Size(granularity.qparam_shape(shape)).numel())
    return Encoding(spec, (1.0 + count).reshape(granularity.qparam_shape(shape)))


@pytest.mark.parametrize("name", CASES)
def test_every_weight_goes_by_its_scale(name):
    geometry, shape, granularity, _ = CASES[name]
    encoding = encoding_of(shape, granularity)
    owner = scale_index_of(shape, encoding, geometry)
    assert owner.dtype == torch.int32
    by_repeating = everywhere(encoding.scale, encoding.spec, torch.Size(shape))
    assert torch.equal(gemm_to_weight(encoding.scale.flatten()[owner], geometry, shape), by_repeating)
    wide = expand_scales(encoding.scale, shape, encoding.spec, geometry)
    assert torch.equal(wide, weight_to_gemm(by_repeating, geometry))


@pytest.mark.parametrize("name", CASES)
def test_columns_that_go_by_one_scale(name):
    geometry, shape, granularity, block = CASES[name]
    assert columns_per_scale(scale_index_of(shape, encoding_of(shape, granularity), geometry)) == block


@pytest.mark.parametrize(
    "rows", [[[0, 0, 1, 1, 1, 1]], [[0, 0, 0, 1, 1]], [[0, 0, 1, 1], [0, 1, 1, 1]], [[0, 0, 0, 0], [0, 0, 1, 1]]]
)
def test_runs_of_several_lengths_are_no_blocks(rows):
    owner = torch.tensor([rows])
    found = columns_per_scale(owner)
    assert found is None or bool((owner.unflatten(-1, (-1, found)).diff() == 0).all())


@pytest.mark.parametrize("rows", [[[0, 0, 0, 1, 1]], [[0, 0, 1, 1], [0, 1, 1, 1]], [[0, 0, 0, 0], [0, 0, 1, 1]]])
def test_uneven_runs_have_no_block(rows):
    assert columns_per_scale(torch.tensor([rows])) is None


@pytest.mark.medium
@pytest.mark.parametrize("setting", [CHANNEL, blocks_of(2)], ids=["channel", "block"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_matrix_is_the_weight_in_another_order(name, setting):
    given = named(name, setting, dtype=torch.float32)
    problem = given.problem
    matrix = problem.to_gemm(problem.weight)
    assert torch.equal(problem.from_gemm(matrix), problem.weight)
    assert problem.from_gemm(matrix.double()).dtype == problem.weight.dtype
    near = problem.grid().nearest(matrix)
    assert torch.equal(problem.from_gemm(near), problem.simulated_weight())


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("name", LAYERS)
def test_the_error_now_is_that_of_the_outputs(name, noise):
    given = named(name, CHANNEL, noise=noise)
    constant = given.lost(given.problem.float_weight)
    expected = given.lost(given.problem.simulated_weight()) - constant
    assert given.problem.current_error() == pytest.approx(expected, rel=1e-6)


def test_gains_add_up_where_they_are_known():
    problem = named("linear", CHANNEL).problem
    weight = problem.to_gemm(problem.weight)
    one = problem.updated(weight=weight * 0.5, loss=(5.0, 3.0))
    two = one.updated(weight=weight * 0.9, loss=(3.0, 2.0))
    assert (one.loss, two.loss) == ((5.0, 3.0), (5.0, 2.0))
    assert problem.loss is None
    assert two.updated(weight=weight).loss is None


@pytest.mark.medium
def test_more_scales_than_float32_counts():
    shape = (4100, 4100)
    encoding = Encoding(QuantSpec(dtype("int4"), PerBlock((1, 1)), symmetric=True), torch.ones(shape))
    owner = scale_index_of(shape, encoding, LINEAR)
    assert torch.equal(owner.flatten(), torch.arange(4100 * 4100, dtype=torch.int32))
