"""The Triton kernel, checked as ``candidate_error_conformance`` says: on a GPU, else in Triton's interpreter."""

import pytest
import torch

from tests.kernels import candidate_error_conformance

kernels = pytest.importorskip("qtk.kernels.gpu.candidate_errors")
pytestmark = pytest.mark.kernels
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def in_triton(x, scales, zero_points, block_size, qmin, qmax, *, norm, importance=None, clipped=1.0):
    given = [None if tensor is None else tensor.to(DEVICE) for tensor in (scales, zero_points, importance)]
    found = kernels.candidate_errors(x.to(DEVICE), *given[:2], block_size, qmin, qmax, norm == 2, given[2], clipped)
    return found.cpu()


class TestTriton(candidate_error_conformance.Conformance):
    backend = "triton"
    errors_of = staticmethod(in_triton)
