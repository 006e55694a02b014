"""The ops as they run here; their reference and their Triton kernels pass the same tests in files of their own."""

import torch

from qtk.numerics.blocks import flat_sizes, split_sizes
from qtk.numerics.statistics import count_scales
from qtk.ops import extremes
from tests.kernels import extremes_conformance
from tests.kernels.extremes_conformance import BOUND, empty, many_weights


class TestOp(extremes_conformance.Conformance):
    backend = "op"
    add_extremes_ = staticmethod(extremes.add_extremes_)


class TestManyInOp(extremes_conformance.ManyConformance):
    add_extremes_many_ = staticmethod(extremes.add_extremes_many_)


def test_opcheck():
    torch.library.opcheck(
        torch.ops.qtk.add_extremes_.default, (torch.randn(3, 4), [1, -1], BOUND, 0, *empty(3)),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_opcheck_of_many():
    xs, block_sizes, leasts = many_weights(torch.float32)
    states = [empty(count_scales(x.shape, block_size)) for x, block_size in zip(xs, block_sizes, strict=True)]
    sizes = flat_sizes(xs, block_sizes)
    assert [list(each) for each in split_sizes(xs, sizes)] == [
        [] if all(size == -1 for size in each) else list(each) for each in block_sizes]
    torch.library.opcheck(
        torch.ops.qtk.add_extremes_many_.default,
        (xs, sizes, [BOUND] * len(xs), leasts, *map(list, zip(*states, strict=True))),
        test_utils=("test_schema", "test_faketensor"),
    )
