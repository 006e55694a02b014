"""The reference against the formulas in numpy's float32."""

import numpy as np
import pytest
import torch

from qtk.numerics import dynamic
from tests.kernels import dynamic_conformance

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, at overflows and NaN


def formula(x, block_size, qmin, qmax, symmetric):
    """All groups of ``x`` by hand, in float32 whatever its type; a group is the whole, or a row of the last axis."""
    whole = not block_size
    rows = x.detach().float().numpy().reshape(1 if whole else -1, x.numel() if whole else x.shape[-1])
    found = [dynamic_conformance.by_hand(row, qmin, qmax, symmetric) for row in rows]
    result, scale, zero = (torch.tensor(np.array(each)) for each in zip(*found, strict=True))
    shape = (1,) if whole else (*x.shape[:-1], 1)
    zero = torch.empty(0, dtype=torch.int32) if symmetric else zero.to(torch.int32).reshape(shape)
    return result.reshape(x.shape).to(x.dtype), scale.reshape(shape), zero


class TestReference(dynamic_conformance.Conformance):
    backend = "reference"
    fake_quantize = staticmethod(dynamic.fake_quantize)
    expected = staticmethod(formula)
