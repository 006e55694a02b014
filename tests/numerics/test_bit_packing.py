import pytest
import torch

from qtk.numerics import bit_packing
from qtk.numerics.bit_packing import pack_bits, packed_bytes, unpack_bits


def packed_by_hand(integers, bits):
    """One Python integer of all bits, the first lowest; more than 8 bits: lower bytes first."""
    if bits > 8:
        return [value & 255 for value in integers] + packed_by_hand([value >> 8 for value in integers], bits - 8)
    whole = sum((value & ((1 << bits) - 1)) << (bits * index) for index, value in enumerate(integers))
    return list(whole.to_bytes(-(-len(integers) * bits // 8), "little"))


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(bit_packing, "PIECE", 16)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("count", [0, 1, 7, 8, 16, 17, 33, 128])
@pytest.mark.parametrize("bits", range(2, 17))
def test_bits_stand_side_by_side_and_come_back(bits, count):
    generator = torch.Generator().manual_seed(bits)
    for signed in (True, False):
        lowest = -(1 << (bits - 1)) if signed else 0
        integers = torch.randint(lowest, lowest + (1 << bits), (count,), generator=generator)
        if count > 1:
            integers[:2] = torch.tensor([lowest, lowest + (1 << bits) - 1])
        packed = pack_bits(integers, bits)
        assert packed.tolist() == packed_by_hand(integers.tolist(), bits)
        assert packed.numel() == packed_bytes(count, bits)
        assert unpack_bits(packed, bits, count, signed=signed).tolist() == integers.tolist()


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32])
def test_any_integer_dtype_and_layout(kind):
    integers = torch.arange(12).reshape(3, 4).to(kind)
    assert pack_bits(integers.t(), 4).tolist() == packed_by_hand(integers.t().flatten().tolist(), 4)
