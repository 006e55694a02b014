"""Specs as the library's arguments."""

import pytest
import torch

from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock, PerChannel, PerTensor, PerToken
from qtk.core.spec import QuantSpec, ScaleFormat
from qtk.export.compressed_tensors.arguments import (
    Unsuited,
    global_scale,
    input_arguments,
    scale_matrices,
    weight_arguments,
)
from qtk.numerics.matrix_axes import MatrixAxes
from qtk.numerics.scale_formats import float8

PLAIN, FIRST, EXPERTS = MatrixAxes((), (0,), (1,)), MatrixAxes((), (1,), (0,)), MatrixAxes((0,), (1,), (2,))


def encoding(name, granularity, shape, **other):
    spec = QuantSpec(dtype(name), granularity, symmetric=True, **other)
    return Encoding(spec, torch.ones(granularity.qparam_shape(shape)))


@pytest.mark.parametrize(("name", "granularity", "axes", "shape", "expected"), [
    ("int4", PerBlock((1, 32)), PLAIN, (6, 64), {"strategy": "group", "group_size": 32, "num_bits": 4, "type": "int"}),
    ("int8", PerChannel(0), PLAIN, (6, 64), {"strategy": "channel", "num_bits": 8}),
    ("fp8_e4m3", PerTensor(), PLAIN, (6, 64), {"strategy": "tensor", "type": "float", "num_bits": 8}),
    ("int4", PerBlock((1, -1)), PLAIN, (6, 64), {"strategy": "channel"}),
    ("int4", PerBlock((32, 1)), FIRST, (64, 6), {"strategy": "block", "block_structure": [32, 1]}),
    ("int8", PerChannel(1), FIRST, (64, 6), {"strategy": "block", "block_structure": [64, 1]}),
    ("int8", PerBlock((1, 1, -1)), EXPERTS, (3, 6, 64), {"strategy": "channel"}),
    ("int4", PerBlock((1, 1, 16)), EXPERTS, (3, 6, 64), {"strategy": "group", "group_size": 16}),
])
def test_weights(name, granularity, axes, shape, expected):
    found = weight_arguments(encoding(name, granularity, shape), axes, shape)
    assert {key: found[key] for key in expected} == expected
    assert (found["symmetric"], found["dynamic"]) == (True, False)


@pytest.mark.parametrize(("name", "granularity", "axes", "shape", "message"), [
    ("int4", PerBlock((2, 32)), PLAIN, (6, 64), "not one for each output"),
    ("int8", PerChannel(1), PLAIN, (6, 64), "not one for each output"),
    ("int5", PerChannel(0), PLAIN, (6, 64), "has int5 codes"),
    ("fp4_e2m1", PerBlock((1, 16)), PLAIN, (6, 64), "has fp4_e2m1 codes"),
    ("int8", PerChannel(0), MatrixAxes((), (0, 1), (2,)), (6, 2, 64), "along several axes"),
])
def test_weights_that_do_not_fit(name, granularity, axes, shape, message):
    with pytest.raises(Unsuited, match=message):
        weight_arguments(encoding(name, granularity, shape), axes, shape)


def test_inputs():
    static = input_arguments(QuantSpec(dtype("uint8")))
    assert static == {"num_bits": 8, "type": "int", "symmetric": False, "dynamic": False, "strategy": "tensor"}
    tokens = input_arguments(QuantSpec(dtype("fp8_e4m3"), PerToken(), symmetric=True, dynamic=True))
    assert tokens == {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    with pytest.raises(Unsuited, match="per_channel"):
        input_arguments(QuantSpec(dtype("int8"), PerChannel(1), symmetric=True))


def test_scales_by_matrix_output_and_block():
    spec = QuantSpec(dtype("int4"), PerBlock((1, 32, 1)), symmetric=True)
    scale = torch.arange(12.0).reshape(3, 2, 2)  # [experts, blocks of inputs, outputs]
    found = scale_matrices(scale, spec, MatrixAxes((0,), (2,), (1,)), (3, 64, 2))
    assert torch.equal(found, scale.mT)


@pytest.mark.parametrize("amax", [1.0, 3.7, 1e-3])
def test_the_global_scale_of_nvfp4(amax):
    blocks = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)) * amax
    scale, unit = float8(blocks, blocks.max())
    divisor = global_scale(scale)
    assert torch.equal(divisor, (1 / unit).reshape(1))
    stored = (scale * divisor).to(torch.float8_e4m3fn).float()
    assert torch.equal(stored * unit, scale)
    spec = QuantSpec(dtype("fp4_e2m1"), PerBlock((1, 16)), symmetric=True, scale_format=ScaleFormat.E4M3)
    found = weight_arguments(Encoding(spec, scale), PLAIN, (4, 128))
    assert (found["strategy"], found["group_size"], found["num_bits"]) == ("tensor_group", 16, 4)
    with pytest.raises(Unsuited, match="no E4M3 numbers"):
        global_scale(torch.rand(4, 8) + 1)
