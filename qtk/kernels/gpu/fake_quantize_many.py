"""Fake-quantizes many matrices in one launch, each row with a scale; formula in ``qtk.numerics.affine``.

Weights are small, and a launch of each takes longer than its bytes. A table of addresses says where the matrices lie; a
program has ``ELEMENTS`` elements of one of them. The table goes to the GPU without the host waiting for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtk.kernels.gpu.fake_quantize import clamped, code_of, effective_scale, narrowed
from qtk.kernels.gpu.launch import on_device_of

ELEMENTS = 2048
"""Elements of a program."""
WARPS = 4
FIELDS = 8
"""Numbers of a matrix in the table: addresses of x, g, y, scales and zero points, width of a row, qmin, qmax."""
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def quantized(
    x_at, g_at, y_at, scale_at, zero_at, qmin, qmax, width, start, count,
    KIND: tl.constexpr, BACKWARD: tl.constexpr, WHOLE: tl.constexpr, ELEMENTS: tl.constexpr,
):
    """The elements of a program; ``WHOLE`` if there are ``ELEMENTS``, which are then read and written without masks."""
    element = tl.arange(0, ELEMENTS)
    offsets = start + element
    mask = None if WHOLE else element < count
    first = start // width
    within = (start - first * width + element).to(tl.int32)
    row = first + (within >= width).to(tl.int64)  # a division takes longer
    if width < ELEMENTS:
        row = first + within // width.to(tl.int32)
    scale = effective_scale(tl.load(scale_at + row, mask=mask))
    zero = tl.zeros([ELEMENTS], tl.float32)
    if zero_at != 0:
        zero = tl.load(zero_at.to(tl.pointer_type(tl.int32)) + row, mask=mask).to(tl.float32)
    x = tl.load(tl.multiple_of(x_at + offsets, [16]), mask=mask).to(tl.float32)
    code = code_of(tl.div_rn(x, scale), zero)
    nearest = clamped(code, qmin, qmax)
    if BACKWARD:
        g = tl.load(tl.multiple_of(g_at + offsets, [16]), mask=mask)
        tl.store(tl.multiple_of(y_at + offsets, [16]), tl.where(nearest == code, g, 0.0).to(KIND), mask=mask)
    else:
        tl.store(tl.multiple_of(y_at + offsets, [16]), narrowed((nearest - zero) * scale, KIND), mask=mask)


@triton.jit
def many_kernel(
    table_at, places_at, KIND: tl.constexpr, BACKWARD: tl.constexpr, FIELDS: tl.constexpr, ELEMENTS: tl.constexpr
):
    place = places_at + tl.program_id(0) * 3
    entry = table_at + tl.load(place) * FIELDS
    start = tl.load(place + 1)
    count = tl.load(place + 2)
    x_at = tl.load(entry).to(tl.pointer_type(KIND))
    g_at = tl.load(entry + 1).to(tl.pointer_type(KIND))
    y_at = tl.load(entry + 2).to(tl.pointer_type(KIND))
    scale_at = tl.load(entry + 3).to(tl.pointer_type(tl.float32))
    zero_at = tl.load(entry + 4)
    width = tl.load(entry + 5)
    qmin = tl.load(entry + 6).to(tl.float32)
    qmax = tl.load(entry + 7).to(tl.float32)
    if count == ELEMENTS:
        quantized(x_at, g_at, y_at, scale_at, zero_at, qmin, qmax, width, start, count, KIND, BACKWARD, True, ELEMENTS)
    else:
        quantized(x_at, g_at, y_at, scale_at, zero_at, qmin, qmax, width, start, count, KIND, BACKWARD, False, ELEMENTS)


def takes(x: Tensor, scale: Tensor, zero_point: Tensor) -> bool:
    """Whether the kernel can compute this matrix."""
    return (
        x.dtype in KINDS and x.is_contiguous() and x.data_ptr() % 16 == 0 and x.numel() > 0 and scale.is_contiguous()
        and zero_point.dtype == torch.int32 and zero_point.is_contiguous()
    )


def run(
    inputs: Sequence[Tensor], scales: Sequence[Tensor], zero_points: Sequence[Tensor], qmins: Sequence[int],
    qmaxs: Sequence[int], grads: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """x̂ of every matrix, or with ``grads`` the gradients of the matrices.

    All matrices have one dtype and are such as the kernel ``takes``; gradients are like them.

    Shape: ``inputs``, ``grads`` and results [rows, columns] each; ``scales`` and ``zero_points`` [rows]; an empty
    zero point means 0.
    """
    results = [torch.empty_like(x) for x in inputs]
    device = inputs[0].device
    table = torch.tensor(
        [
            (x.data_ptr(), g.data_ptr(), y.data_ptr(), scale.data_ptr(), zero.data_ptr() if zero.numel() else 0,
             x.shape[1], qmin, qmax)
            for x, g, y, scale, zero, qmin, qmax in zip(
                inputs, inputs if grads is None else grads, results, scales, zero_points, qmins, qmaxs, strict=True
            )
        ],
        dtype=torch.int64, pin_memory=device.type == "cuda",
    ).to(device, non_blocking=True)
    places = places_of(tuple(x.numel() for x in inputs), device)
    with on_device_of(inputs[0]):
        many_kernel[(len(places),)](
            table, places, KIND=KINDS[inputs[0].dtype], BACKWARD=grads is not None, FIELDS=FIELDS, ELEMENTS=ELEMENTS,
            num_warps=WARPS,
        )
    return results


@functools.lru_cache(maxsize=64)
def places_of(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Matrix, first element and number of elements of every program. Shape: int64 [programs, 3]."""
    places = [
        (index, start, min(ELEMENTS, size - start))
        for index, size in enumerate(sizes) for start in range(0, size, ELEMENTS)
    ]
    return torch.tensor(places, dtype=torch.int64).to(device)
