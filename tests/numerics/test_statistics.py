"""The references against torch, scale by scale, in float64."""

from qtk.numerics import statistics as reference
from tests.kernels import statistics_conformance


class TestReference(statistics_conformance.Conformance):
    backend = "reference"
    min_max = staticmethod(reference.min_max)
    histogram = staticmethod(reference.histogram)


class TestSquares(statistics_conformance.SquaresConformance):
    backend = "reference"
    histogram_of_squares = staticmethod(reference.histogram_of_squares)
