"""The reference, rounding by the references of feedback rounding and fake-quantization, against a loop over weights."""

import torch

from qtk.numerics import affine, coordinate_descent, feedback_rounding
from tests.kernels import coordinate_descent_conformance
from tests.kernels.coordinate_descent_conformance import QMAX, QMIN, problem


def by_reference(rounded, change, half_gradient, gram, step, scale, zero_point, qmin, qmax):
    def round_columns(columns, target, moves, feedback):
        scales = scale[..., columns]
        zeros = None if zero_point is None else zero_point[..., columns]

        def nearest(x, column):
            zero = None if zeros is None else zeros[..., column]
            return affine.fake_quantize(x.float(), scales[..., column], zero, (1, 1), qmin, qmax)

        feedback_rounding.round_with_feedback_(target, moves, feedback, nearest, backwards=False)

    coordinate_descent.descend_(rounded, change, half_gradient, gram, step, round_columns)


class TestReference(coordinate_descent_conformance.Conformance):
    descend_ = staticmethod(by_reference)


def test_all_columns_at_once_or_a_few_at_a_time(monkeypatch):
    results = []
    for count in (1, 7, 128):
        monkeypatch.setattr(coordinate_descent, "COLUMNS_AT_ONCE", count)
        given = problem(45)
        by_reference(*given, QMIN, QMAX)
        results.append(given[:3])
    for other in results[1:]:
        for one, another in zip(results[0], other, strict=True):
            assert torch.equal(one, another)
