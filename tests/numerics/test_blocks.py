import pytest
import torch

from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.errors import SpecError
from qtk.numerics import blocks

SHAPES = [
    (PerTensor(), (3, 5)),
    (PerTensor(), ()),
    (PerChannel(0), (7, 3)),
    (PerChannel(-1), (2, 3, 5)),
    (PerChannel(1), (2, 3, 4, 5)),
    (PerChannel(0), (6,)),
    (PerBlock((1, 4)), (3, 8)),
    (PerBlock((2, 4)), (6, 8)),
    (PerBlock((-1, 4)), (6, 8)),
    (PerBlock((1, 1)), (2, 3)),
    (PerBlock((1, 2, -1, 1)), (2, 4, 3, 5)),
    (PerBlock((3,)), (9,)),
]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(blocks, "PIECE", 7)


def owner(index, granularity, shape):
    """The index into the scales of the element at ``index``, spelled out."""
    match granularity:
        case PerTensor():
            return (0,)
        case PerChannel(axis):
            return (index[axis % len(shape)],)
        case PerBlock(sizes):
            return tuple(0 if size == -1 else i // size for i, size in zip(index, sizes, strict=True))


@pytest.mark.parametrize(("granularity", "shape"), SHAPES, ids=str)
def test_every_element_meets_its_own_scale(granularity, shape):
    values = torch.arange(torch.Size(granularity.qparam_shape(shape)).numel()).reshape(granularity.qparam_shape(shape))
    block_size = granularity.block_size(len(shape))
    split = blocks.split_shape(shape, block_size)[0] if block_size else shape
    met = blocks.align(values, shape, block_size).expand(split or (1,)).reshape(shape)
    for index in torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist() if shape else [[]]:
        assert met[tuple(index)] == values[owner(index, granularity, shape)]


@pytest.mark.parametrize(("granularity", "shape"), SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
@pytest.mark.usefixtures("small_pieces")
def test_pieces_cover_each_element_once_with_its_scale(granularity, shape, layout):
    values = torch.rand(granularity.qparam_shape(shape))
    x = laid_out(torch.zeros(shape), layout)
    result = torch.full_like(x, -1.0)
    block_size = granularity.block_size(len(shape))
    count = 0
    for (part, out), (scale, none) in blocks.pieces((x, result), (values, None), block_size):
        assert none is None
        part += 1  # a piece is a view
        out.copy_(scale.expand(part.shape))
        count += 1
    assert torch.equal(x, torch.ones(shape))
    assert count > 1 or x.numel() <= 7 or max(x.shape) == x.numel()
    for index in torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist() if shape else [[]]:
        assert result[tuple(index)] == values[owner(index, granularity, shape)]


def laid_out(x, layout):
    match layout:
        case "transposed" if x.ndim > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        case "strided" if x.ndim:
            wide = torch.zeros([2 * length for length in x.shape], dtype=x.dtype)
            view = wide[tuple(slice(None, None, 2) for _ in x.shape)]
            return view.copy_(x)
    return x


def test_pieces_of_tensors_that_lie_differently_still_belong_together(small_pieces):
    a = torch.arange(12.0).reshape(3, 4)
    b = a.t().contiguous().t()
    for (left, right), _ in blocks.pieces((a, b), (torch.ones(1),), ()):
        assert torch.equal(left, right)


def test_align_copies_nothing():
    scale = torch.rand(8, 4)
    assert blocks.align(scale, (8, 128), (1, 32)).data_ptr() == scale.data_ptr()


@pytest.mark.parametrize(
    ("values", "shape", "block_size"),
    [
        ((2,), (3,), ()), ((3,), (8, 5), (1, -1)), ((8, 3), (8, 16), (1, 4)), ((8, 4), (8, 18), (1, 4)),
        ((1,), (4, 4), (1,)), ((8,), (8, 16), (1, 4)),
    ],
)
def test_scales_that_do_not_fit_are_refused_with_both_shapes(values, shape, block_size):
    with pytest.raises(SpecError) as caught:
        blocks.align(torch.ones(values), shape, block_size)
    assert str(values) in str(caught.value)
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize("permutation", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_flat_is_a_view_in_memory_order(permutation):
    x = torch.arange(24).reshape(2, 3, 4).permute(permutation)
    assert blocks.flat(x).tolist() == list(range(24))
    assert blocks.flat(x).data_ptr() == x.data_ptr()


def test_what_has_holes_or_overlaps_is_not_flat():
    assert blocks.flat(torch.zeros(4, 6)[:, ::2]) is None
    assert blocks.flat(torch.zeros(4, 1).expand(4, 3)) is None
