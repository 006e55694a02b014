"""The Triton kernel, checked as ``feedback_rounding_conformance`` says: on a GPU, else in Triton's interpreter."""

import pytest
import torch

from tests.kernels import feedback_rounding_conformance

kernels = pytest.importorskip("qtk.kernels.gpu.feedback_rounding")
pytestmark = pytest.mark.kernels
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def in_triton(target, change, feedback, scale, zero_point, qmin, qmax, *, backwards):
    own = [None if each is None else each.to(DEVICE) for each in (target, change, feedback, scale, zero_point)]
    kernels.round_with_feedback_(*own, qmin, qmax, backwards)
    target.copy_(own[0])
    change.copy_(own[1])


class TestTriton(feedback_rounding_conformance.Conformance):
    round_with_feedback_ = staticmethod(in_triton)
