import pytest
import torch

from qtk.aimet.fields import block_axis, check_fields, offset_of, stored_zero_point, zero_point_of
from qtk.core.dtypes import INT32, dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError, ExportError


@pytest.mark.parametrize("name", ["int8", "uint8", "int4", "uint16", "int32"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_offset_times_the_scale_is_the_lowest_real(name, symmetric):
    # AIMET's meaning: minimum = offset · scale, whatever the sign of the type
    spec = QuantSpec(INT32 if name == "int32" else dtype(name), symmetric=symmetric)
    zero = None if symmetric else torch.tensor([3], dtype=torch.int32)
    encoding = Encoding(spec, torch.tensor([0.25]), zero)
    lowest = -(2 ** (spec.dtype.bits - 1)) if spec.dtype.signed else 0
    expected = lowest - int(stored_zero_point(encoding))
    assert offset_of(encoding).tolist() == [expected]
    back = zero_point_of(offset_of(encoding), spec)
    assert back is None if symmetric else torch.equal(back, zero)


def test_an_offset_beyond_all_codes_is_no_zero_point():
    spec = QuantSpec(dtype("uint8"))
    far = zero_point_of(torch.tensor([-(2**60)]), spec)
    with pytest.raises(EncodingError, match="every zero point must lie in"):
        Encoding(spec, torch.ones(1), far)


def test_a_field_that_contradicts_is_named():
    spec = QuantSpec(dtype("uint8"))
    with pytest.raises(EncodingError, match=r"bw is 4, but the site is planned as uint8 .*, which needs 8"):
        check_fields({"bw": 4}, {"bw": 8}, spec)


def test_the_length_of_a_whole_axis_needs_the_shape():
    spec = QuantSpec(dtype("int8"), PerBlock((1, -1)), symmetric=True)
    assert block_axis(spec, (4, 12)) == (1, 12)
    with pytest.raises(ExportError, match="exactly one axis"):
        block_axis(spec, None)
