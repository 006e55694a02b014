"""The reference, rounding by the reference of fake-quantization, against a loop over numbers."""

import torch

from qtk.numerics import affine, feedback_rounding
from tests.kernels import feedback_rounding_conformance


def by_reference(target, change, feedback, scale, zero_point, qmin, qmax, *, backwards):
    def nearest(x, column):
        zero = None if zero_point is None else zero_point[..., column]
        return affine.fake_quantize(x.float(), scale[..., column], zero, (1, 1), qmin, qmax)

    feedback_rounding.round_with_feedback_(target, change, feedback, nearest, backwards=backwards)


class TestReference(feedback_rounding_conformance.Conformance):
    round_with_feedback_ = staticmethod(by_reference)


def test_any_function_that_rounds():
    target = torch.tensor([[[0.3, 0.3, 0.3]]])
    change, feedback = target.clone(), torch.ones(1, 3, 3)
    feedback_rounding.round_with_feedback_(
        target, change, feedback, lambda x, column: x.round() + 10 * column, backwards=False
    )
    assert target.flatten().tolist() == [0, 11, 10]  # 0.3, 0.3 + 0.3, 0.3 + 0.3 - 10.7
    torch.testing.assert_close(change.flatten(), torch.tensor([0.3, -10.7, -9.7]))
