"""The reference against a loop over elements."""

from qtk.numerics import extremes as reference
from tests.kernels import extremes_conformance


class TestReference(extremes_conformance.Conformance):
    backend = "reference"
    add_extremes_ = staticmethod(reference.add_extremes_)
