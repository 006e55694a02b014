import pytest
import torch

from qtk.aimet.fields import NamedEncoding
from qtk.aimet.schema_0_6_1 import decode, records
from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerChannel
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError, ExportError

PER_CHANNEL = QuantSpec(dtype("int8"), PerChannel(0), symmetric=True)


def test_a_record_for_each_channel():
    listed = records(NamedEncoding("w", Encoding(PER_CHANNEL, torch.tensor([0.5, 0.25])), is_parameter=True))
    ranges = [(each["min"], each["max"], each["offset"]) for each in listed]
    assert ranges == [(-64.0, 63.5, -128), (-32.0, 31.75, -128)]
    scale, zero_point = decode(listed, PER_CHANNEL, (2, 4))
    assert (scale.tolist(), zero_point) == ([0.5, 0.25], None)


@pytest.mark.parametrize("broken", [None, [], {}, [1], "x"])
def test_what_is_no_list_of_records(broken):
    with pytest.raises(EncodingError, match="needs a list of records"):
        decode(broken, PER_CHANNEL, (2, 4))


def test_one_scale_is_not_many():
    listed = records(NamedEncoding("w", Encoding(PER_CHANNEL, torch.tensor([0.5, 0.25])), is_parameter=True))
    with pytest.raises(EncodingError, match=r"it has 2 scales, .* which needs one"):
        decode(listed, QuantSpec(dtype("int8"), symmetric=True), None)


def test_floats_are_refused():
    spec = QuantSpec(dtype("fp8_e4m3"), symmetric=True)
    with pytest.raises(ExportError, match=r"schema 0\.6\.1 holds no fp8_e4m3"):
        records(NamedEncoding("w", Encoding(spec, torch.ones(1)), is_parameter=True))
