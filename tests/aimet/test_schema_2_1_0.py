import pytest
import torch

from qtk.aimet import schema_2_0_0
from qtk.aimet.fields import NamedEncoding
from qtk.aimet.schema_2_1_0 import decode, record
from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock
from qtk.core.spec import QuantSpec, ScaleFormat
from qtk.errors import EncodingError

LPBQ = QuantSpec(dtype("int4"), PerBlock((1, 4)), symmetric=True, scale_format=ScaleFormat.INT4)
WRITTEN = {"output_dtype": "int4", "axis": 1, "block_size": 4}


def test_the_scale_of_lpbq_is_quantized_itself():
    """As AIMET 2.42 writes it, but for a negative axis."""
    encoding = Encoding(LPBQ, torch.tensor([[1.5, 0.75], [0.5, 0.25]]))
    written = record(NamedEncoding("w", encoding, is_parameter=True))
    assert written == {"name": "w", **WRITTEN, "y_scale": {
        "x": [[16, 8], [16, 8]], "x_scale": [0.09375, 0.03125], "axis": 0}}
    for axis in (0, -2):
        scale, zero_point = decode({**written, "y_scale": {**written["y_scale"], "axis": axis}}, LPBQ, (2, 8))
        assert torch.equal(scale, encoding.scale)
        assert zero_point is None


@pytest.mark.parametrize("spec", [
    QuantSpec(dtype("uint8")), QuantSpec(dtype("int4"), PerBlock((1, 4)), symmetric=True),
])
def test_all_else_is_as_in_2_0_0(spec):
    shape = (2, 2) if isinstance(spec.granularity, PerBlock) else (1,)
    encoding = Encoding(spec, torch.full(shape, 0.5), None if spec.symmetric else torch.tensor([3], dtype=torch.int32))
    named = NamedEncoding("x", encoding, is_parameter=False)
    assert record(named) == schema_2_0_0.record(named)
    assert torch.equal(decode(record(named), spec, (2, 8))[0], encoding.scale)


@pytest.mark.parametrize(("scale", "said"), [
    ([[0.5, 0.5], [0.5, 0.5]], "which needs x, x_scale and axis"),
    ({"x": [[1, 2]], "x_scale": [0.5], "axis": 2}, "axis of y_scale is 2, and x has 2 axes"),
    ({"x": [[1, "a"]], "x_scale": [0.5], "axis": 0}, "not a tensor"),
])
def test_what_does_not_fit_is_told(scale, said):
    with pytest.raises(EncodingError, match=said):
        decode({**WRITTEN, "y_scale": scale}, LPBQ, (2, 8))
