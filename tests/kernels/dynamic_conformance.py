"""What every backend of ``qtk::fake_quantize_dynamic`` must do: the checks, the cases, and the formulas in numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from qtk.core.granularity import PerTensor, PerToken
from qtk.numerics import dynamic
from qtk.numerics.effective import SMALLEST_SCALE
from tests.kernels.backend_matrix import OneBackend, matrix
from tests.kernels.conformance import KINDS, LAYOUTS, same_bits

BACKENDS = "op", "reference", "triton"
CODES = {"int8": (-128, 127, True), "uint8": (0, 255, False), "int4": (-8, 7, True), "narrow": (-7, 7, True),
         "uint4": (0, 15, False), "int16": (-32768, 32767, False)}
SHAPES = [(1,), (37,), (3, 1), (5, 131), (2, 3, 7, 11), (4, 5, 1023), (9, 70000), (2, 0), (0, 4), (3, 197, 384)]
GRANULARITIES = {"per_tensor": PerTensor(), "per_token": PerToken()}


def by_hand(row: np.ndarray, qmin: int, qmax: int, symmetric: bool) -> tuple[np.ndarray, np.float32, int]:
    """One group of elements that share a scale, step by step in float32.

    A NaN makes all elements, and the scale, NaN. The scale is bounded so that every code is a finite number.
    """
    f = np.float32
    if np.isnan(row).any():
        return np.full_like(row, np.nan), f(np.nan), qmin
    low, high = min(row.min(), f(0)), max(row.max(), f(0))
    scale = max(high / f(qmax), low / f(qmin)) if symmetric else (high - low) / f(qmax - qmin)
    farthest = max(qmax, -qmin) if symmetric else qmax - qmin
    largest = f(float(np.finfo(f).max) * (1 - 2.0**-23) / farthest)
    scale = f(1) if scale == 0 else np.clip(scale, f(SMALLEST_SCALE), largest)
    zero = 0 if symmetric else int(np.clip(np.rint(f(qmin) - low / scale), qmin, qmax))
    codes = np.clip(np.rint(row / scale) + f(zero), qmin, qmax)
    return (codes - f(zero)) * scale, scale, zero


class Conformance(OneBackend):
    """The tests of one backend; a subclass whose name begins with Test says which."""

    fake_quantize: Callable[..., tuple[Tensor, Tensor, Tensor]]
    expected: Callable[..., tuple[Tensor, Tensor, Tensor]] = staticmethod(dynamic.fake_quantize)

    @matrix(shape=SHAPES, granularity=GRANULARITIES, codes=CODES, backend=BACKENDS)
    def test_is_the_formula(self, shape, granularity, codes):
        qmin, qmax, symmetric = CODES[codes]
        sizes = GRANULARITIES[granularity].block_size(len(shape))
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3 + 0.5
        result, scale, zero = self.fake_quantize(x, sizes, qmin, qmax, symmetric)
        assert scale.shape == GRANULARITIES[granularity].qparam_shape(shape)
        assert zero.shape == ((0,) if symmetric else scale.shape)
        assert zero.dtype == torch.int32
        if not x.numel():
            assert result.shape == shape
            assert bool((scale == 1).all())
            return
        rows = x.numpy().reshape(scale.numel(), -1)
        found = [by_hand(row, qmin, qmax, symmetric) for row in rows]
        assert torch.equal(result, torch.tensor(np.stack([row for row, _, _ in found])).reshape(shape))
        assert torch.equal(scale.reshape(-1), torch.tensor(np.array([step for _, step, _ in found])))
        if not symmetric:
            assert zero.reshape(-1).tolist() == [code for _, _, code in found]

    @matrix(backend=BACKENDS, codes=["int8", "uint8"], granularity=GRANULARITIES, layout=LAYOUTS, kind=KINDS)
    def test_every_layout_and_dtype_is_the_reference(self, codes, granularity, layout, kind):
        qmin, qmax, symmetric = CODES[codes]
        for shape in [(6,), (5, 131), (2, 3, 7, 11), (64, 1000)]:
            x = LAYOUTS[layout](torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(kind))
            spec = GRANULARITIES[granularity].block_size(len(shape)), qmin, qmax, symmetric
            own, own_scale, own_zero = self.fake_quantize(x, *spec)
            result, scale, zero = self.expected(x, *spec)
            assert same_bits(own, result)
            assert own.stride() == torch.empty_like(x).stride()
            assert torch.equal(own_scale, scale)
            assert torch.equal(own_zero, zero)

    @pytest.mark.parametrize("codes", ["int8", "uint8"])
    def test_special_numbers(self, codes):
        qmin, qmax, symmetric = CODES[codes]
        largest, tiny = torch.finfo(torch.float32).max, torch.finfo(torch.float32).smallest_normal
        x = torch.tensor([
            [torch.nan, 1.0, 2.0], [torch.inf, 1.0, -1.0], [-torch.inf, 1.0, torch.inf], [0.0, -0.0, 0.0],
            [largest, -largest, 1.0], [tiny / 4, -tiny / 8, 0.0], [largest, 0.0, 1.0], [-largest, 0.0, -1.0],
        ])
        spec = (1, -1), qmin, qmax, symmetric
        own, own_scale, own_zero = self.fake_quantize(x, *spec)
        result, scale, zero = self.expected(x, *spec)
        assert same_bits(own, result)
        assert same_bits(own_scale, scale)
        assert torch.equal(own_zero, zero)
        assert bool(own[0].isnan().all())
        assert bool(own[1:].isfinite().all())
        assert own[3].tolist() == [0.0, 0.0, 0.0]
        for row in (6, 7):  # what reaches to the end of float32 loses at most one step, for all codes must be finite
            assert float(own[row, 0] / x[row, 0]) == pytest.approx(1.0, abs=1 / 127)
