"""The Triton kernels, checked as ``dynamic_conformance`` says: on a GPU, else in Triton's interpreter."""

import pytest
import torch

from tests.kernels import dynamic_conformance

kernels = pytest.importorskip("qtk.kernels.gpu.fake_quantize_dynamic")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # Triton's interpreter, at overflows and NaN
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def in_triton(x, *spec):
    return tuple(part.cpu() for part in kernels.fake_quantize_dynamic(x.to(DEVICE), *spec))


class TestTriton(dynamic_conformance.Conformance):
    backend = "triton"
    fake_quantize = staticmethod(in_triton)
