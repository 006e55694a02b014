"""The Triton kernels, checked as ``statistics_conformance`` says: on a GPU, else in Triton's interpreter."""

import pytest
import torch

from qtk.numerics.statistics import count_scales
from tests.kernels import statistics_conformance

kernels = pytest.importorskip("qtk.kernels.gpu.statistics")
# of Triton's interpreter
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def min_max_in_triton(x, block_size):
    found = kernels.min_max(x.to(DEVICE), block_size, count_scales(x.shape, block_size))
    return tuple(bound.cpu() for bound in found)


def histogram_in_triton(x, first, exponent, bins, block_size):
    return kernels.histogram(x.to(DEVICE), first.to(DEVICE), exponent.to(DEVICE), bins, block_size).cpu()


class TestTriton(statistics_conformance.Conformance):
    backend = "triton"
    min_max = staticmethod(min_max_in_triton)
    histogram = staticmethod(histogram_in_triton)
