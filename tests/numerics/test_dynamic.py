"""The reference against the formulas in numpy's float32."""

import pytest

from qtk.numerics import dynamic
from tests.kernels import dynamic_conformance

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, at overflows and NaN


class TestReference(dynamic_conformance.Conformance):
    backend = "reference"
    fake_quantize = staticmethod(dynamic.fake_quantize)
