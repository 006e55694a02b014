import math

import pytest
import torch

from qtk.core.block_formats import BLOCK_FORMATS
from qtk.core.dtypes import FloatDtype, dtype
from qtk.core.granularity import PerChannel, PerToken, PerTokenBlock
from qtk.core.spec import QuantSpec, ScaleFormat
from qtk.errors import SpecError
from qtk.numerics import affine, dynamic, minifloat
from qtk.ops.simulate import simulate, simulate_dynamic
from tests.numerics.small_floats import nearest

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


FORMATS = [name for name in BLOCK_FORMATS if name != "lpbq_int4"]


def in_blocks(name, length, axis, *, dynamic=True):
    row = BLOCK_FORMATS[name]
    return QuantSpec(row.dtype, PerTokenBlock(length, axis), symmetric=True, narrow_range=row.narrow_range,
                     dynamic=dynamic, scale_format=row.scale_format)


def step_of(largest, spec, kind, divisor):
    """The scale of a block, in Python's floats: OCP Microscaling with the exponent of the rounded maximum, or NVFP4."""
    if largest == 0:
        return 1.0
    if spec.scale_format is ScaleFormat.E4M3:
        return (nearest(float(torch.tensor(largest, dtype=kind) / 6) * divisor, dtype("fp8_e4m3")) or 0.125) / divisor
    exponent, format = math.floor(math.log2(largest)), spec.dtype
    if not isinstance(format, FloatDtype):
        return 2.0 ** (exponent - 6)
    bits = 1 if format.bits == 8 else format.mantissa_bits
    exponent += math.floor(largest / 2.0**exponent * 2**bits + 0.5) == 2 ** (bits + 1)
    return 2.0 ** (exponent - math.floor(math.log2(format.largest)))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_activations_in_blocks_number_by_number(name, kind):
    x = (torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 2, 11)).to(kind)
    x[0, 0] = 0
    for axis, scale in ((-1, None), (-1, torch.tensor([3.0])), (-2, None)):
        if scale is not None and name != "nvfp4":
            continue
        spec = in_blocks(name, 4 if axis == -1 else 2, axis, dynamic=scale is None)
        given = x.clone().requires_grad_()
        found = simulate_dynamic(given, spec) if scale is None else simulate(given, spec, scale)
        divisor = 448 / 3.0 if scale is not None else 448 * 6 / float(x.abs().max())
        for row, own in zip(x.movedim(axis, -1).reshape(-1, x.shape[axis]).tolist(),
                            found.detach().movedim(axis, -1).reshape(-1, x.shape[axis]).tolist(), strict=True):
            for begin in range(0, len(row), spec.granularity.length):
                values, rounded = (each[begin:begin + spec.granularity.length] for each in (row, own))
                step = step_of(max(map(abs, values)), spec, kind, divisor)
                expected = [nearest(each / step, spec.dtype) * step if isinstance(spec.dtype, FloatDtype)
                            else max(-127, min(127, round(each / step))) * step for each in values]
                assert rounded == pytest.approx(torch.tensor(expected).to(kind).tolist(), rel=1e-6)
        found.sum().backward()
        assert given.grad.min() >= 0
        assert (given.grad == 1).float().mean() > (0.9 if scale is None else 0.4)  # straight through, but for clipped


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8_e4m3"])
def test_a_million_values_have_the_codes_of_compressed_tensors(name, kind):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle import forward as lifecycle
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

    spec, is_nvfp4 = in_blocks(name, BLOCK_FORMATS[name].length, -1, dynamic=name != "nvfp4"), name == "nvfp4"
    args = quantization.QuantizationArgs(
        num_bits=spec.dtype.bits, type="float", strategy="tensor_group" if is_nvfp4 else "group",
        dynamic="local" if is_nvfp4 else True, group_size=spec.granularity.length,
        scale_dtype=torch.float8_e4m3fn if is_nvfp4 else torch.uint8)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 1024, generator=generator) * torch.randn(1024, 1, generator=generator).exp()
    x = (x * (torch.rand(1024, 1024, generator=generator) * 6).exp()).to(kind)
    calibrated = x.abs().max().float().reshape(1) / 6
    divisor = 448 / calibrated if is_nvfp4 else None  # as files have it
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Linear(1, 1), divisor)
    expected = lifecycle.fake_quantize(x, scale, zero, args, divisor)
    assert torch.equal(simulate(x, spec, calibrated) if is_nvfp4 else simulate_dynamic(x, spec), expected)
    if divisor is not None:
        torch.testing.assert_close(divisor, generate_gparam(x.min().float(), x.max().float()), rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_values_near_the_smallest_floats_stay_finite_beside_blocks_of_zeros(name):
    x = torch.cat([torch.zeros(4), torch.full((4,), 1e-37)])
    assert simulate_dynamic(x, in_blocks(name, 4, -1)).abs().max() <= 2e-37
