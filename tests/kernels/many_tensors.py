"""Calls of ``qtk::fake_quantize`` to be made together: tensors of every shape of ``conformance``, with their ranges."""

import torch

from tests.kernels import conformance

ZERO_POINTS = {"symmetric": None, "int32": torch.int32, "learned": torch.float32}
SLOW = ("channel_last_wide", "block_of_a_wide_axis")  # in the interpreter, and nothing new
CODES = ((-8, 7), (-128, 127), (-64, 64))


def tensors(zero_point=torch.float32, kind=torch.float32, *, grad=True, layout="contiguous"):
    """The arguments of a call for each shape of the conformance tests."""
    calls = []
    for seed, (name, (shape, block_size)) in enumerate(conformance.SHAPES.items()):
        if name in SLOW:
            continue
        codes = CODES[seed % len(CODES)]
        scale, zero = conformance.ranges(shape, block_size, zero_point, *codes, seed=seed)
        x = conformance.LAYOUTS[layout](conformance.values(shape, scale, kind, seed=seed).nan_to_num())
        leaves = [x.detach().requires_grad_(grad), scale.requires_grad_(grad)]
        if zero is not None and zero.is_floating_point():
            zero.requires_grad_(grad)
        calls.append((*leaves, zero, block_size, *codes))
    return calls


def columns(calls):
    return [list(column) for column in zip(*calls, strict=True)]
