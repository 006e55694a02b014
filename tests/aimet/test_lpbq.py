import pytest
import torch

from qtk.aimet.lpbq import channel_axis, joined, split
from qtk.core.dtypes import dtype
from qtk.core.granularity import PerBlock
from qtk.core.spec import QuantSpec, ScaleFormat
from qtk.errors import ExportError
from qtk.numerics.scale_formats import candidates, integer_multiples


@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 1, 1), (1, 1), (64, 33)])
@pytest.mark.parametrize("axis", [0, 1])
def test_every_bit_of_a_scale_is_in_its_integer_and_its_channel(shape, axis):
    generator = torch.Generator().manual_seed(1)
    scale, _ = integer_multiples(torch.rand(shape, generator=generator) * 1e-3 + 1e-9, axis, bits=4)
    integers, channel_scale = split(scale, axis)
    assert torch.equal(joined(integers, channel_scale), scale)
    assert 1 <= int(integers.min()) <= int(integers.max()) <= 16
    assert channel_scale.shape == tuple(size if index == axis else 1 for index, size in enumerate(shape))


def test_a_search_may_leave_smaller_integers():
    spec = QuantSpec(dtype("int4"), PerBlock((1, 4)), symmetric=True, scale_format=ScaleFormat.INT4)
    scale, _ = integer_multiples(torch.rand(50, 6, generator=torch.Generator().manual_seed(2)), 0, bits=4)
    for multiple in range(16):
        searched = candidates(scale, torch.ones(()), spec)[multiple]
        assert torch.equal(joined(*split(searched, channel_axis(spec))), searched)


def test_scales_of_no_common_unit_are_refused():
    with pytest.raises(ExportError, match="no integers up to 16 times a float32 number"):
        split(torch.tensor([[1.0, 0.123]]), 0)
