"""The op as it runs here, and its fallback, which rounds by the op of feedback rounding."""

import pytest
import torch

from qtk.kernels.backends import load_native
from qtk.ops import coordinate_descent as op
from tests.kernels import coordinate_descent_conformance
from tests.kernels.coordinate_descent_conformance import QMAX, QMIN, problem


class TestOp(coordinate_descent_conformance.Conformance):
    descend_ = staticmethod(op.descend_)


class TestFallback(coordinate_descent_conformance.Conformance):
    descend_ = staticmethod(op._reference)


@pytest.mark.skipif(load_native() is not None, reason=f"C++ kernels: {load_native()}")
def test_what_does_not_fit_is_refused():
    given = problem(16)
    for index, wrong in {0: given[0][:, :1], 1: given[1].mT.contiguous().mT, 3: given[3][:1], 4: given[4][:, :3],
                         5: given[5][..., :3]}.items():
        with pytest.raises(ValueError, match=r"shape|gaps"):
            op.descend_(*given[:index], wrong, *given[index + 1 :], QMIN, QMAX)


def test_what_pytorch_asks_of_an_op():
    torch.library.opcheck(torch.ops.qtk.descend_.default, (*problem(16, asymmetric=True), QMIN, QMAX))
