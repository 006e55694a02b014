import pytest
import torch

from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerChannel
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError
from qtk.export.read_back import compare_encodings

SPEC = QuantSpec(dtype("uint8"), PerChannel(0))


def encoding(scale=(0.5, 0.25), zero_point=(3, 4), spec=SPEC):
    return Encoding(spec, torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32))


def test_equal_encodings_pass_in_any_order():
    compare_encodings({"a": encoding(), "b": encoding()}, {"b": encoding(), "a": encoding()})


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({}, "a is missing in the file"),
        ({"a": encoding(), "b": encoding()}, "b is not quantized in the simulation"),
        ({"a": encoding(scale=(0.5, 0.25000003))}, r"a: scale\[1\] is 0\.2500000\d* in the file and 0\.25 in the sim"),
        ({"a": encoding(zero_point=(2, 4))}, r"a: zero_point\[0\] is 2 in the file and 3 in the simulation"),
        ({"a": encoding(spec=QuantSpec(dtype("uint4"), PerChannel(0)))}, r"a: uint4 .* in the file and uint8 "),
        ({"a": encoding(scale=(0.5,), zero_point=(3,))}, r"a: scales of shape \(1,\) in the file and \(2,\)"),
    ],
)
def test_each_difference_names_its_site(stored, said):
    with pytest.raises(ExportError, match=said):
        compare_encodings(stored, {"a": encoding()})
