import math

import pytest
import torch

from qtk.numerics.error import sqnr_db


def test_sqnr_is_that_of_sums_in_python():
    reference, value = [1.0, -2.0, 3.5], [1.1, -2.0, 3.0]
    noise = sum((r - v) ** 2 for r, v in zip(reference, value, strict=True))
    expected = 10 * math.log10(sum(r * r for r in reference) / noise)
    assert sqnr_db(torch.tensor(reference), torch.tensor(value)) == pytest.approx(expected, rel=1e-5)


def test_sqnr_sees_a_scale_that_is_twice_too_large():
    x = torch.randn(100)
    assert sqnr_db(x, 2 * x) == pytest.approx(0.0, abs=1e-6)


def test_sqnr_of_equals_and_of_nothing():
    assert sqnr_db(torch.ones(3), torch.ones(3)) == math.inf
    assert sqnr_db(torch.zeros(3), torch.zeros(3)) == math.inf
    assert sqnr_db(torch.zeros(3), torch.ones(3)) == -math.inf


def test_sqnr_does_not_overflow_half_precision():
    x = torch.full((1000,), 1000.0, dtype=torch.float16)
    assert sqnr_db(x, x + 1) == pytest.approx(60.0, abs=1e-6)
