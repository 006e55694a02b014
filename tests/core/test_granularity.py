import pytest

from qtk.core.granularity import PerBlock, PerChannel, PerTensor, PerToken, PerTokenBlock
from qtk.errors import SpecError


@pytest.mark.medium
@pytest.mark.parametrize(
    ("granularity", "shape", "block_size", "qparams"),
    [
        (PerTensor(), (), (), (1,)),
        (PerTensor(), (2, 3, 4), (), (1,)),
        (PerChannel(0), (5, 7), (1, -1), (5,)),
        (PerChannel(1), (5, 7, 3), (-1, 1, -1), (7,)),
        (PerChannel(-1), (5, 7), (-1, 1), (7,)),
        (PerChannel(-2), (5, 7), (1, -1), (5,)),
        (PerChannel(0), (1,), (1,), (1,)),
        (PerToken(), (6, 8), (1, -1), (6, 1)),
        (PerToken(), (2, 6, 8), (1, 1, -1), (2, 6, 1)),
        (PerToken(), (8,), (-1,), (1,)),
        (PerToken(), (), (), (1,)),
        (PerBlock((1, 4)), (6, 8), (1, 4), (6, 2)),
        (PerBlock((-1, 4)), (6, 8), (-1, 4), (1, 2)),
        (PerBlock((2, 8)), (6, 8), (2, 8), (3, 1)),
    ],
    ids=str,
)
def test_block_size_and_qparam_shape(granularity, shape, block_size, qparams):
    assert granularity.block_size(len(shape)) == block_size
    assert granularity.qparam_shape(shape) == qparams


@pytest.mark.parametrize(("axis", "rank"), [(2, 2), (-3, 2), (0, 0)])
def test_an_axis_that_is_not_there_is_refused(axis, rank):
    with pytest.raises(SpecError, match=f"axis {axis} does not exist in a tensor of rank {rank}"):
        PerChannel(axis).block_size(rank)


def test_blocks_that_do_not_divide_say_which_axis():
    with pytest.raises(SpecError, match=r"block_size 5 does not divide axis 1 of shape \(8, 16\); use a divisor of 16"):
        PerBlock((1, 5)).qparam_shape((8, 16))


def test_blocks_of_another_rank_are_refused():
    with pytest.raises(SpecError, match="rank 2, got rank 3"):
        PerBlock((1, 4)).block_size(3)


@pytest.mark.parametrize("sizes", [(), (0, 4), (-2,)])
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(SpecError, match="positive"):
        PerBlock(sizes)


def test_they_are_values():
    assert PerChannel(0) == PerChannel(0) != PerChannel(1)
    assert len({PerTensor(), PerTensor(), PerBlock((1, 4)), PerBlock((1, 4))}) == 2
    assert [str(g) for g in (PerTensor(), PerChannel(0), PerToken(), PerBlock((1, 4)))] == [
        "per_tensor", "per_channel(axis=0)", "per_token", "per_block(1, 4)"
    ]


def test_blocks_of_tokens_are_counted_from_the_end():
    blocks = PerTokenBlock(16, -3)
    assert (blocks.sizes(4), blocks.block_size(4), blocks.qparam_shape((2, 32, 5, 5))) == ((1, 16, 1, 1), (), (1,))
    with pytest.raises(SpecError, match="axis -3 does not exist in a tensor of rank 2"):
        blocks.sizes(2)
    for wrong in ((0, -1), (16, 1)):
        with pytest.raises(SpecError, match="counted from the end"):
            PerTokenBlock(*wrong)
