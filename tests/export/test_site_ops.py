"""The ops of a site against the formulas of ``qtk.numerics``."""

import pytest
import torch

from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.core.spec import QuantSpec
from qtk.export.site_ops import ComputedSite, StoredSite, has_ops
from qtk.numerics import affine, minifloat
from qtk.numerics.codes import storage_dtype

BLOCKS = {"per tensor": PerTensor(), "per channel": PerChannel(1), "groups": PerBlock((1, 4)),
          "blocks on both axes": PerBlock((2, 4)), "whole rows": PerBlock((1, -1))}


def encoding_of(spec, shape):
    scale = torch.exp2(torch.arange(torch.Size(spec.granularity.qparam_shape(shape)).numel()) % 5 - 6.0)
    scale = scale.reshape(spec.granularity.qparam_shape(shape))
    zero_point = None if spec.symmetric else torch.full(scale.shape, int(spec.qmin) + 3, dtype=torch.int32)
    return Encoding(spec, scale, zero_point)


def simulated(x, encoding):
    spec, sizes = encoding.spec, encoding.spec.granularity.block_size(x.ndim)
    if hasattr(spec.dtype, "largest"):
        return minifloat.fake_quantize(x, encoding.scale, sizes, spec.dtype)
    return affine.fake_quantize(x, encoding.scale, encoding.zero_point, sizes, int(spec.qmin), int(spec.qmax))


@pytest.mark.medium
@pytest.mark.parametrize("granularity", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize(("name", "symmetric"), [("int8", True), ("uint8", False), ("uint8", True), ("int4", True),
                                                 ("uint12", False), ("int16", False), ("fp8_e4m3", True),
                                                 ("fp8_e5m2", True), ("fp4_e2m1", True), ("fp6_e3m2", True)])
def test_stored_codes_dequantize_to_the_simulation(name, symmetric, granularity):
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    encoding = encoding_of(QuantSpec(dtype(name), granularity, symmetric=symmetric), x.shape)
    stored = StoredSite("w", encoding, x)
    assert stored.codes.dtype == storage_dtype(encoding.spec)
    torch.testing.assert_close(stored(), simulated(x, encoding), rtol=0, atol=0)


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(1), PerChannel(-1)], ids=str)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_computed_values_are_the_simulation(granularity, kind):
    torch.manual_seed(0)
    x = torch.randn(5, 6, 7).to(kind)
    encoding = encoding_of(QuantSpec(dtype("uint8"), granularity), x.shape)
    torch.testing.assert_close(ComputedSite("x", encoding, 3)(x), simulated(x, encoding), rtol=0, atol=0)


def test_what_has_ops():
    int8 = dtype("int8")
    assert has_ops(QuantSpec(int8, PerChannel(0), symmetric=True), (4, 4))
    assert has_ops(QuantSpec(int8, PerBlock((1, 2)), symmetric=True), (4, 4))
    assert not has_ops(QuantSpec(int8, PerBlock((1, 2)), symmetric=True), None)
    assert has_ops(QuantSpec(dtype("uint16")), None)
    assert not has_ops(QuantSpec(dtype("uint16"), PerChannel(0)), None)
    assert not has_ops(QuantSpec(int8, PerBlock((2, 2)), symmetric=True), (4, 4))
    assert not has_ops(QuantSpec(int8, PerBlock((1, 1)), symmetric=True), (4, 4))
    assert not has_ops(QuantSpec(dtype("fp8_e4m3"), symmetric=True), (4, 4))
    assert not has_ops(QuantSpec(int8, dynamic=True, symmetric=True), None)
