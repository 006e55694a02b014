"""Integers of few bits, side by side in bytes: eight of ``bits`` bits fill ``bits`` bytes, the first the lowest bits.

Integers of more than 8 bits are two rows: their lower bytes, then what is above, packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

PIECE = 1 << 20
"""Integers that are packed at a time, a multiple of 8: intermediate results are eight times as large."""


def pack_bits(integers: Tensor, bits: int) -> Tensor:
    """The lowest ``bits`` bits of each integer; the last byte is filled with zeros.

    Shape: ``integers`` any; result uint8 [bytes].

    >>> pack_bits(torch.tensor([1, 2, -1]), 4).tolist()
    [33, 15]
    """
    flat = integers.reshape(-1)
    if bits > 8:
        return torch.cat([_wide(flat).bitwise_and(255).to(torch.uint8), pack_bits(_wide(flat) >> 8, bits - 8)])
    packed = torch.empty(packed_bytes(flat.numel(), bits), dtype=torch.uint8)
    for start in range(0, flat.numel(), PIECE):
        piece = flat[start:start + PIECE].to("cpu", torch.int64).bitwise_and((1 << bits) - 1)
        octets = torch.nn.functional.pad(piece, (0, -piece.numel() % 8)).view(-1, 8)
        words = (octets << (bits * torch.arange(8))).sum(1, keepdim=True)
        part = packed[start * bits // 8:(start + PIECE) * bits // 8]
        part.copy_((words >> (8 * torch.arange(bits))).bitwise_and(255).view(-1)[:part.numel()])
    return packed


def unpack_bits(packed: Tensor, bits: int, count: int, *, signed: bool) -> Tensor:
    """The integers that ``pack_bits`` packed. Shape: ``packed`` uint8 [bytes]; result int32 [count].

    >>> unpack_bits(torch.tensor([33, 15], dtype=torch.uint8), 4, 3, signed=True).tolist()
    [1, 2, -1]
    """
    if bits > 8:
        above = unpack_bits(packed[count:], bits - 8, count, signed=signed)
        return (above << 8) | packed[:count].to(torch.int32)
    integers = torch.empty(count, dtype=torch.int32)
    for start in range(0, count, PIECE):
        piece = packed[start * bits // 8:(start + PIECE) * bits // 8].to(torch.int64)
        words = torch.nn.functional.pad(piece, (0, -piece.numel() % bits)).view(-1, bits)
        octets = (words << (8 * torch.arange(bits))).sum(1, keepdim=True)
        part = integers[start:start + PIECE]
        part.copy_((octets >> (bits * torch.arange(8))).bitwise_and((1 << bits) - 1).view(-1)[:part.numel()])
    return torch.where(integers >= 1 << (bits - 1), integers - (1 << bits), integers) if signed else integers


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that ``count`` integers of ``bits`` bits fill.

    >>> packed_bytes(3, 4), packed_bytes(3, 12)
    (2, 5)
    """
    return count + packed_bytes(count, bits - 8) if bits > 8 else -(-count * bits // 8)


def _wide(integers: Tensor) -> Tensor:
    return integers.to("cpu", torch.int32)
