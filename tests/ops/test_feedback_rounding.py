"""The op as it runs here, and its fallback, which rounds by the op of fake-quantization."""

import pytest
import torch

from qtk.kernels.backends import load_native
from qtk.ops import feedback_rounding as op
from tests.kernels import feedback_rounding_conformance
from tests.kernels.feedback_rounding_conformance import QMAX, QMIN, problem


def by_fallback(target, change, feedback, scale, zero_point, qmin, qmax, *, backwards):
    op._reference(target, change, feedback, scale, zero_point, qmin, qmax, backwards)


class TestOp(feedback_rounding_conformance.Conformance):
    round_with_feedback_ = staticmethod(op.round_with_feedback_)


class TestFallback(feedback_rounding_conformance.Conformance):
    round_with_feedback_ = staticmethod(by_fallback)


@pytest.mark.skipif(load_native() is not None, reason=f"C++ kernels: {load_native()}")
def test_what_does_not_fit_is_refused():
    target, change, feedback, scale, _ = problem(5)
    for wrong in (
        (target, change[..., :4], feedback, scale), (target, change, feedback[:, :4], scale),
        (target, change, feedback, scale[:1]), (target.mT.contiguous().mT, change, feedback, scale),
    ):
        with pytest.raises(ValueError, match=r"shape|gaps"):
            op.round_with_feedback_(*wrong, None, QMIN, QMAX, backwards=False)


def test_what_pytorch_asks_of_an_op():
    target, change, feedback, scale, zero = problem(5, asymmetric=True)
    given = target, change, feedback, scale, zero, QMIN, QMAX, False
    torch.library.opcheck(torch.ops.qtk.round_with_feedback_.default, given)
