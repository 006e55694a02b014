import pytest
import torch

from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerChannel
from qtk.core.spec import QuantSpec
from qtk.numerics.affine import fake_quantize
from qtk.numerics.clipping import count_clipped, in_scales, range_filled
from qtk.ops.simulate import simulate


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["int8", "uint8", "int4", "uint4", "int16"])
def test_a_clipped_value_is_one_that_a_wider_range_changes(name, symmetric):
    torch.manual_seed(0)
    spec = QuantSpec(dtype(name), PerChannel(0), symmetric=symmetric)
    x, scale = torch.randn(3, 501) * 3, torch.tensor([0.1, 3.0, 40.0]) / spec.qmax
    zero = None if symmetric else torch.tensor([0, 3, 7], dtype=torch.int32)
    near = fake_quantize(x, scale, zero, (1, -1), int(spec.qmin), int(spec.qmax))
    far = fake_quantize(x, scale, zero, (1, -1), -(1 << 23), 1 << 23)
    encoding = Encoding(spec, scale, zero)
    assert count_clipped(in_scales(x, encoding), encoding) == int((near != far).sum()) > 0


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1"])
def test_of_a_small_float_what_rounds_to_its_largest_is_not_clipped(name):
    spec = QuantSpec(dtype(name), symmetric=True)
    encoding = Encoding(spec, torch.tensor([1.0]))
    largest = spec.dtype.maximum
    distance = largest - float(simulate(torch.linspace(0, largest, 100_001), spec, encoding.scale, None).unique()[-2])
    x = torch.tensor([1.0, -1.0]) * (largest + 0.49 * distance)
    assert count_clipped(x, encoding) == 0
    assert count_clipped(torch.tensor([1.0, -1.0]) * (largest + 0.51 * distance), encoding) == 2


def test_the_range_of_a_symmetric_format_is_filled_by_the_larger_side():
    assert range_filled(-64.0, 127.0, QuantSpec(dtype("int8"), symmetric=True)) == 1.0
    assert range_filled(3.0, 127.5, QuantSpec(dtype("uint8"))) == 0.5  # real 0 has a code, whatever is seen
