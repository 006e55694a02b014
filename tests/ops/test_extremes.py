"""The ops as they run here; their reference and their Triton kernels pass the same tests in files of their own."""

import torch

from qtk.ops import extremes
from tests.kernels import extremes_conformance
from tests.kernels.extremes_conformance import BOUND, empty


class TestOp(extremes_conformance.Conformance):
    backend = "op"
    add_extremes_ = staticmethod(extremes.add_extremes_)


def test_opcheck():
    torch.library.opcheck(
        torch.ops.qtk.add_extremes_.default, (torch.randn(3, 4), [1, -1], BOUND, 0, *empty(3)),
        test_utils=("test_schema", "test_faketensor"),
    )
