import pytest
import torch

from qtk.core.dtypes import DTYPES, INT32, dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.core.spec import QuantSpec
from qtk.numerics import affine, minifloat
from qtk.numerics.codes import codes_of, storage_dtype, values_of


@pytest.mark.medium
def test_every_dtype_has_a_storage_that_holds_its_limits():
    for row in [*DTYPES.values(), INT32]:
        kind = storage_dtype(QuantSpec(row, symmetric=row.signed))
        limits = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
        assert limits.min <= row.minimum
        assert limits.max >= row.maximum


def test_small_floats_are_stored_exactly():
    for name in ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1"):
        spec = QuantSpec(dtype(name), symmetric=True)
        x = torch.linspace(-600, 600, 4001)
        codes = codes_of(x, Encoding(spec, torch.ones(1)))
        torch.testing.assert_close(codes.float(), minifloat.quantize(x, torch.ones(1), (), spec.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerChannel(-1), PerBlock((2, 4)),
                                         PerBlock((1, -1))], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", DTYPES)
def test_codes_dequantize_to_the_fake_quantized_constant(name, symmetric, granularity):
    row = dtype(name)
    if not symmetric and isinstance(row, type(dtype("fp4_e2m1"))):
        pytest.skip("small floats have no zero point")
    spec = QuantSpec(row, granularity, symmetric=symmetric)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    scale = torch.rand(granularity.qparam_shape((6, 8)), generator=torch.Generator().manual_seed(1)) * 0.01 + 0.001
    zero_point = None if symmetric else torch.full(scale.shape, int(spec.qmin) + 3, dtype=torch.int32)
    encoding, sizes = Encoding(spec, scale, zero_point), granularity.block_size(2)
    expected = minifloat.fake_quantize(x, scale, sizes, row) if hasattr(row, "largest") else (
        affine.fake_quantize(x, scale, zero_point, sizes, int(spec.qmin), int(spec.qmax)))
    codes = codes_of(x, encoding)
    assert codes.dtype == storage_dtype(spec)
    assert torch.equal(values_of(codes, encoding), expected)
