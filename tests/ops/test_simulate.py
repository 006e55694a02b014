import pytest
import torch

from qtk.core.dtypes import dtype
from qtk.core.granularity import PerChannel, PerToken
from qtk.core.spec import QuantSpec
from qtk.errors import SpecError
from qtk.numerics import affine, dynamic, minifloat
from qtk.ops.simulate import simulate, simulate_dynamic

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(("spec", "reference"), [
    (QuantSpec(dtype("int4"), PerChannel(0), symmetric=True, narrow_range=True),
     lambda scale, zero: affine.fake_quantize(X, scale, None, (1, -1), -7, 7)),
    (QuantSpec(dtype("uint8"), PerChannel(1)),
     lambda scale, zero: affine.fake_quantize(X, scale, zero, (-1, 1), 0, 255)),
    (QuantSpec(dtype("fp4_e2m1"), PerChannel(0), symmetric=True),
     lambda scale, zero: minifloat.fake_quantize(X, scale, (1, -1), dtype("fp4_e2m1"))),
], ids=["int4", "uint8", "fp4"])
def test_the_format_of_the_spec_decides(spec, reference):
    shape = spec.granularity.qparam_shape(X.shape)
    scale, zero = torch.rand(shape) * 0.1 + 0.02, None if spec.symmetric else torch.randint(0, 255, shape).int()
    x = X.clone().requires_grad_()
    found = simulate(x, spec, scale, zero)
    assert torch.equal(found, reference(scale, zero))
    found.sum().backward()
    assert set(x.grad.unique().tolist()) <= {0.0, 1.0}
    with pytest.raises(SpecError):
        simulate(X[:3, :5], spec, scale, zero)


def test_a_range_of_its_own():
    spec = QuantSpec(dtype("uint8"), PerToken(), dynamic=True)
    assert torch.equal(simulate_dynamic(X, spec), dynamic.fake_quantize(X, (1, -1), 0, 255, False)[0])
    spec = QuantSpec(dtype("fp8_e4m3"), PerToken(), symmetric=True, dynamic=True)
    scale = X.abs().amax(1) / 448
    torch.testing.assert_close(
        simulate_dynamic(X, spec), minifloat.fake_quantize(X, scale, (1, -1), dtype("fp8_e4m3")), rtol=1e-6, atol=0
    )
