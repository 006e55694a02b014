import pytest
import torch

from qtk.aimet.fields import NamedEncoding
from qtk.aimet.schema_2_0_0 import decode, record
from qtk.core.dtypes import INT32, dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerChannel
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError


def test_an_unsigned_symmetric_format_has_its_middle_code_as_zero_point():
    spec = QuantSpec(dtype("uint8"), symmetric=True)
    written = record(NamedEncoding("x", Encoding(spec, torch.tensor([0.5])), is_parameter=False))
    assert written == {"name": "x", "output_dtype": "uint8", "y_scale": 0.5, "y_zero_point": 128}
    assert decode(written, spec, None)[1] is None


def test_an_int32_bias():
    spec = QuantSpec(INT32, PerChannel(0), symmetric=True)
    written = record(NamedEncoding("b", Encoding(spec, torch.tensor([0.5, 0.25])), is_parameter=True))
    assert written == {"name": "b", "output_dtype": "int32", "y_scale": [0.5, 0.25], "axis": 0}


def test_a_per_tensor_site_takes_no_axis():
    with pytest.raises(EncodingError, match=r"axis is 0, .* needs None"):
        decode({"output_dtype": "uint8", "y_scale": 0.5, "axis": 0}, QuantSpec(dtype("uint8")), None)
