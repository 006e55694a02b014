import pytest
import torch

from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerChannel
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError

SYMMETRIC = QuantSpec(dtype("int8"), PerChannel(0), symmetric=True)
ASYMMETRIC = QuantSpec(dtype("uint8"), PerChannel(0))


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_minimum_and_maximum_are_the_reals_of_the_outermost_codes():
    encoding = Encoding(ASYMMETRIC, torch.tensor([0.5, 2.0]), ints(10, 0))
    assert encoding.minimum.tolist() == [-5.0, 0.0]
    assert encoding.maximum.tolist() == [122.5, 510.0]
    encoding = Encoding(SYMMETRIC, torch.tensor([0.5]))
    assert (encoding.minimum.item(), encoding.maximum.item()) == (-64.0, 63.5)


@pytest.mark.parametrize(
    ("spec", "scale", "zero_point", "said"),
    [
        (SYMMETRIC, torch.ones(2, dtype=torch.float64), None, "float32"),
        (SYMMETRIC, torch.tensor(1.0), None, "at least one axis"),
        (SYMMETRIC, torch.tensor([1.0, 0.0]), None, "positive"),
        (SYMMETRIC, torch.tensor([1.0, -1.0]), None, "positive"),
        (SYMMETRIC, torch.tensor([1.0, torch.nan]), None, "finite"),
        (SYMMETRIC, torch.tensor([1.0, torch.inf]), None, "finite"),
        (SYMMETRIC, torch.ones(2), ints(0, 0), "has no zero point"),
        (ASYMMETRIC, torch.ones(2), None, "needs a zero point"),
        (ASYMMETRIC, torch.ones(2), torch.zeros(2), "int32"),
        (ASYMMETRIC, torch.ones(2), ints(0), r"of shape \(2,\)"),
        (ASYMMETRIC, torch.ones(2), ints(0, -1), r"0…255"),
        (ASYMMETRIC, torch.ones(2), ints(0, 256), r"0…255"),
    ],
)
def test_numbers_that_cannot_be_are_refused(spec, scale, zero_point, said):
    with pytest.raises(EncodingError, match=said):
        Encoding(spec, scale, zero_point)


def test_equality_is_of_spec_and_bits():
    one = Encoding(ASYMMETRIC, torch.ones(2), ints(1, 2))
    assert one.equals(Encoding(ASYMMETRIC, torch.ones(2), ints(1, 2)))
    assert not one.equals(Encoding(ASYMMETRIC, torch.ones(2), ints(1, 3)))
    assert not one.equals(Encoding(ASYMMETRIC, torch.tensor([1.0, 1.0000001]), ints(1, 2)))
    assert not one.equals(Encoding(QuantSpec(dtype("uint8")), torch.ones(2), ints(1, 2)))
    symmetric = Encoding(SYMMETRIC, torch.ones(2))
    assert symmetric.equals(Encoding(SYMMETRIC, torch.ones(2)))
    assert not symmetric.equals(one)
