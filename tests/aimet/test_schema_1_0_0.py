import pytest
import torch

from qtk.aimet.fields import NamedEncoding
from qtk.aimet.schema_1_0_0 import decode, record
from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError

BLOCKS = QuantSpec(dtype("uint4"), PerBlock((1, 4)))


def written():
    zeros = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    encoding = Encoding(BLOCKS, torch.tensor([[0.5, 1.0], [2.0, 4.0]]), zeros)
    return record(NamedEncoding("w", encoding, is_parameter=True))


def test_blocks_are_flat_and_get_their_shape_from_the_tensor():
    assert (written()["scale"], written()["offset"]) == ([0.5, 1.0, 2.0, 4.0], [0, -1, -2, -3])
    scale, zero_point = decode(written(), BLOCKS, (2, 8))
    assert (scale.tolist(), zero_point.tolist()) == ([[0.5, 1.0], [2.0, 4.0]], [[0, 1], [2, 3]])


def test_blocks_of_another_shape_are_refused():
    with pytest.raises(RuntimeError, match="shape"):
        decode(written(), BLOCKS, (2, 12))
    with pytest.raises(EncodingError, match="block_size is 2"):
        decode({**written(), "block_size": 2}, BLOCKS, (2, 8))


@pytest.mark.parametrize("is_sym", [True, False])
def test_the_offset_decides_and_not_the_flag(is_sym):
    spec = QuantSpec(dtype("uint8"))
    plain = {"dtype": "INT", "enc_type": "PER_TENSOR", "bw": 8, "is_sym": is_sym, "scale": [0.5], "offset": [-128]}
    assert decode(plain, spec, None)[1].tolist() == [128]
    assert decode(plain, QuantSpec(dtype("int8"), symmetric=True), None)[1] is None
    with pytest.raises(EncodingError, match="the zero point is not 0"):
        decode({**plain, "offset": [-127]}, QuantSpec(dtype("int8"), symmetric=True), None)
