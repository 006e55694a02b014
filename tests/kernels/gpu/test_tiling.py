import pytest
import torch

from qtk.kernels.gpu import tiling as tilings
from qtk.kernels.gpu.tiling import TILE, fitted, shifted, tiling_of
from tests.kernels import conformance


@pytest.mark.parametrize("layout", conformance.LAYOUTS)
@pytest.mark.parametrize("case", [name for name, (shape, _) in conformance.SHAPES.items() if 0 not in shape])
def test_every_element_is_visited_with_its_scale(case, layout):
    shape, block_size = conformance.SHAPES[case]
    x = conformance.LAYOUTS[layout](torch.zeros(shape))
    if not x.is_contiguous() and sorted(x.stride()) != sorted(torch.empty_like(x).stride()):
        x = x.contiguous()
    owners = torch.empty_like(x, dtype=torch.int64).copy_(conformance.owners(shape, block_size))
    tiling = tiling_of(x, block_size)
    if tiling is None:
        assert case == "block_deep"  # three axes of scales in this order of memory
        return
    lengths = tiling.outer, tiling.s1, tiling.middle, tiling.s2, tiling.inner
    index = torch.arange(x.numel()).reshape(lengths)
    s1 = torch.arange(tiling.s1).reshape(1, -1, 1, 1, 1) * tiling.step1
    s2 = torch.arange(tiling.s2).reshape(1, 1, 1, -1, 1) * tiling.step2
    in_memory_order = owners.as_strided((x.numel(),), (1,))
    assert torch.equal((s1 + s2 + 0 * index).reshape(-1), in_memory_order)
    assert tiling.scales_a_tile * tiling.reach <= TILE
    covered = tiling.groups * tiling.turns * tiling.scales_a_tile * tiling.reach
    assert x.numel() <= covered <= max(8 * x.numel(), TILE)


@pytest.mark.parametrize("programs", [1, 2, 7, 1000])
def test_splits_share_all_turns_and_none_is_idle(programs):
    tiling = tiling_of(torch.zeros(3, 5, 7000), (-1, 1, -1))
    splits = tiling.splits(programs)
    each = -(-tiling.turns // splits)
    assert 1 <= splits <= max(1, programs // tiling.groups)
    assert (splits - 1) * each < tiling.turns <= splits * each


def test_more_turns_than_32_bits_count_are_left_to_the_reference():
    shape, block_size = (1 << 31, 2, 4), (-1, 1, -1)
    assert tiling_of(torch.empty(shape, device="meta"), block_size) is None
    tiling = tiling_of(torch.empty((1 << 30, 2, 4), device="meta"), block_size)
    assert tiling.turns == 1 << 30


def test_so_are_more_scales_along_an_axis():
    """The last tile of almost 2^31 of them would end beyond what 32 bits count."""
    assert tiling_of(torch.empty(2, (1 << 31) - 16, device="meta"), (-1, 1)) is None
    assert tiling_of(torch.empty(2, 1 << 30, device="meta"), (-1, 1)) is not None


@pytest.mark.parametrize(("shape", "block_size", "flat"), [
    ((37, 1031), (), True), ((3, 5, 7), (-1, -1, -1), True), ((1,), (1,), True), ((1, 8), (1, -1), True),
    ((2, 8), (1, -1), False), ((8, 3), (-1, 1), False),
])
def test_a_tensor_with_one_scale_is_a_stream(shape, block_size, flat):
    assert tiling_of(torch.zeros(shape), block_size).flat == flat


@pytest.mark.parametrize(("shape", "block_size", "kind", "shift"), [
    ((64, 197), (1, -1), torch.float32, 4), ((64, 197), (1, -1), torch.bfloat16, 8), ((64, 60), (1, 20), torch.half, 8),
    ((64, 208), (1, -1), torch.float32, 0),  # aligned
    ((64, 15), (1, -1), torch.float32, 0),  # short
    ((64, 197), (-1, 1), torch.float32, 0), ((64, 197), (), torch.float32, 0),  # columns, aligned
    ((197,), (), torch.float32, 4),  # a stream that ends anywhere
    ((64, 1001), (1, -1), torch.float32, 0),  # a tile of long rows
])
def test_rows_that_begin_anywhere_have_a_shift_of_128_bits(shape, block_size, kind, shift, monkeypatch):
    x = torch.zeros(shape, dtype=kind)
    tiling = tiling_of(x, block_size)
    assert shifted(tiling, x).shift == shift
    for moved in (shifted(tiling, x, light=True), amd(monkeypatch, lambda: shifted(tiling, x))):
        assert moved.shift == (shift or 4 * (shape == (64, 1001)))
    assert shifted(tiling, x, x.double()).shift == min(shift, 2)


def test_a_stream_that_is_written_has_a_tail_in_place_of_a_shift():
    x = torch.zeros(63, 197)
    tiling = tiling_of(x, ())
    assert shifted(tiling, x).shift == 4
    assert fitted(tiling, x).shift == 0


def amd(monkeypatch, run):
    with monkeypatch.context() as patch:
        patch.setattr(tilings, "is_amd", lambda: True)
        return run()


def test_a_tensor_that_itself_begins_anywhere_is_not_shifted():
    """The 128 bits of its last element might lie beyond the memory it is in."""
    memory = torch.zeros(64 * 197 + 1)
    x, other = memory[1:].view(64, 197), torch.zeros(64, 197)
    tiling = tiling_of(x, (1, -1))
    assert shifted(tiling, other).shift == 4
    assert shifted(tiling, x) == shifted(tiling, other, x) == tiling


@pytest.mark.parametrize("inner", [17, 197, 1023, 5003])
def test_a_shifted_row_ends_in_its_last_tile_wherever_it_begins(inner):
    x = torch.zeros(8, inner)
    tiling = shifted(tiling_of(x, (1, -1)), x, light=True)
    assert tiling.shift - 1 + inner <= tiling.turns * tiling.reach
    assert tiling.scales_a_tile * tiling.reach <= TILE
