import pytest
import torch

from qtk.core.dtypes import dtype
from qtk.core.encoding import HOST, Encoding, moved
from qtk.core.granularity import PerBlock, PerChannel
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError
from tests.pretend_gpu import pretended_gpu, to_gpu

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


@pytest.mark.parametrize("zeros", [None, (3, 250, 7)])
def test_scales_one_after_the_other_split_into_encodings(zeros):
    spec = QuantSpec(dtype("uint8"), symmetric=zeros is None)
    blocks = QuantSpec(dtype("uint8"), PerBlock((1, 4)), symmetric=zeros is None)
    whole = Encoding(spec, torch.tensor([0.5, 2.0, 4.0]), None if zeros is None else ints(*zeros))
    one, two = whole.split([(spec, (1,)), (blocks, (1, 2))])
    assert (one.spec, one.scale.tolist()) == (spec, [0.5])
    assert (two.spec, two.scale.tolist()) == (blocks, [[2.0, 4.0]])
    found = [part.zero_point if zeros is None else part.zero_point.tolist() for part in (one, two)]
    assert found == ([None, None] if zeros is None else [[3], [[250, 7]]])


def test_equality_is_of_spec_and_bits():
    one = Encoding(ASYMMETRIC, torch.ones(2), ints(1, 2))
    assert one.equals(Encoding(ASYMMETRIC, torch.ones(2), ints(1, 2)))
    assert not one.equals(Encoding(ASYMMETRIC, torch.ones(2), ints(1, 3)))
    assert not one.equals(Encoding(ASYMMETRIC, torch.tensor([1.0, 1.0000001]), ints(1, 2)))
    assert not one.equals(Encoding(QuantSpec(dtype("uint8")), torch.ones(2), ints(1, 2)))
    symmetric = Encoding(SYMMETRIC, torch.ones(2))
    assert symmetric.equals(Encoding(SYMMETRIC, torch.ones(2)))
    assert not symmetric.equals(one)


TENSORS = (
    torch.tensor([1e-45, -3.4e38, torch.inf, -0.0]), torch.tensor(7, dtype=torch.int64), torch.tensor(True),
    torch.arange(6, dtype=torch.int32).reshape(2, 3), torch.tensor([0.1], dtype=torch.float64), torch.zeros(0, 3),
    torch.tensor([2**53 - 1, -(2**53)]), torch.tensor([1.5], dtype=torch.bfloat16), torch.arange(6.0).reshape(2, 3).t(),
)


def test_tensors_of_the_device_are_handed_on():
    assert all(one is other for one, other in zip(moved(TENSORS, HOST), TENSORS, strict=True))
    assert moved((), HOST) == []


def test_all_travel_in_one_copy_and_keep_value_shape_and_dtype(monkeypatch):
    pytest.importorskip("triton")
    with pretended_gpu(monkeypatch) as gpu:
        there = to_gpu(TENSORS)
        back = moved([TENSORS[0], *there], HOST)
        assert len(gpu.waits) == 1
        again = moved(back, there[0].device)
        assert len(gpu.waits) == 2
        assert {tensor.device.type for tensor in again} == {"cuda"}
    assert back[0] is TENSORS[0]
    for found in (back[1:], [tensor.host for tensor in again[1:]]):
        for tensor, expected in zip(found, TENSORS, strict=True):
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected)
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, "it keeps the memory of all"
    assert torch.signbit(back[1][3])
