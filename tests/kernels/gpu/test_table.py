"""The table of a launch for many tensors: which tensors share it, their tile, and what programs read in its rows."""

import itertools
from dataclasses import dataclass

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language
table = pytest.importorskip("qtk.kernels.gpu.table")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 1, -1


@dataclass(frozen=True, slots=True, eq=False)
class Row(table.Job):
    """A tensor whose own columns are its address and a number."""

    number: int = 0
    label: str = ""

    @property
    def own(self):
        return self.x, self.number

    @property
    def kind(self):
        return (self.label,)


def jobs_of(shapes, labels=None):
    """A job for each shape, whose tensor is filled with its number."""
    xs = [torch.full(shape, float(number), device=DEVICE) for number, shape in enumerate(shapes)]
    labels = labels or [""] * len(xs)
    return [Row(x, table.shared_tiling(x, ROWS), number, label)
            for number, (x, label) in enumerate(zip(xs, labels, strict=True))]


@triton.jit
def reading_kernel(
    table_at, tensors, x_at, found_at, ONES: tl.constexpr, SIXTEENS: tl.constexpr, MOST: tl.constexpr
):
    tensor = table.tensor_of_program(table_at, tensors, MOST)
    row_at, program = table.row_of(table_at, tensor)
    at = found_at + tl.program_id(0) * 5
    tl.store(at, tensor)
    tl.store(at + 1, program)
    tl.store(at + 2, tl.load(table.pointer(row_at, 0, x_at)).to(tl.int32))
    tl.store(at + 3, table.size(row_at, table.S2, ONES, SIXTEENS))
    tl.store(at + 4, table.size(row_at, table.INNER, ONES, SIXTEENS))


@pytest.mark.parametrize(("shapes", "ones", "sixteens"), [
    ([(5, 16), (300, 144), (1, 32)], [], ["INNER"]),
    ([(16, 1023), (32, 1), (2048, 7)], [], ["S2"]),
    ([(1, 50), (1, 1021), (1, 3000)], ["S2"], []),
    ([(3, 1), (1000, 1), (1, 1), (7, 1)], ["INNER"], []),
    ([(8, 40), (24, 1000)], [], []),
    ([(1, 1)], ["S2", "INNER"], []),
], ids=str)
def test_every_program_reads_the_row_of_its_tensor(shapes, ones, sixteens):
    jobs = table.with_one_tile(jobs_of(shapes))
    made = table.uploaded(jobs)
    found = torch.full((made.programs, 5), -1, dtype=torch.int32, device=DEVICE)
    bits = {name: made.constants[name] for name in ("ONES", "SIXTEENS", "MOST")}
    reading_kernel[(made.programs,)](made.rows, len(jobs), jobs[0].x, found, **bits)
    expected = [
        [number, program, number, *shape] for number, (shape, job) in enumerate(zip(shapes, jobs, strict=True))
        for program in range(job.tiling.groups * job.splits)
    ]
    assert found.tolist() == expected
    for name in ("S2", "INNER"):
        place = getattr(table, name).value
        assert bits["ONES"] >> place & 1 == (name in ones)
        assert bits["SIXTEENS"] >> place & 1 == (name in sixteens)
    assert made.tickets == sum(room.numel() for room in made.rooms) == 0  # nothing is summed


def test_tensors_of_a_kind_run_together_in_their_order(monkeypatch):
    monkeypatch.setattr(table, "MOST_TENSORS", 3)
    jobs = jobs_of([(1, 1)] * 9, "abaaababa")
    found = [[job.number for job in together] for together in table.launches(jobs)]
    assert found == [[0, 2, 3], [4, 6, 8], [1, 5, 7]]
    assert list(table.launches([])) == []


@pytest.mark.parametrize("shapes", [
    [(1, 1)], [(3, 5), (64, 144), (8, 768)], [(1, 100_003), (7, 3)], [(1021, 2), (5, 1023)], [(512, 64)] * 3,
], ids=str)
def test_the_tile_that_all_share_has_the_fewest_turns(shapes):
    jobs = jobs_of(shapes)
    together = table.with_one_tile(jobs)
    assert len({(job.tiling.scales_a_tile, job.tiling.reach) for job in together}) == 1
    assert [job.x for job in together] == [job.x for job in jobs]
    elements = max(job.tiling.scales_a_tile * job.tiling.reach for job in jobs)
    powers = [1 << exponent for exponent in range(elements.bit_length())]
    tiles = [(scales, reach) for scales, reach in itertools.product(powers, powers) if scales * reach <= elements]
    turns = [
        sum(-(-rows // scales) * -(-width // reach) for rows, width in shapes)
        for scales, reach in tiles if reach >= min(4, elements)
    ]
    assert sum(job.tiling.groups * job.tiling.turns for job in together) == min(turns)


def test_what_cannot_share_a_launch_has_no_tiling():
    x = torch.zeros(4, 6, 8)
    assert table.shared_tiling(x, (1, -1, -1)) is not None
    assert table.shared_tiling(x.transpose(0, 2), (1, -1, -1)) is not None
    assert table.shared_tiling(x[..., ::2], (1, -1, -1)) is None  # gaps
    assert table.shared_tiling(x.double(), (1, -1, -1)) is None
    assert table.shared_tiling(x[:0], (1, -1, -1)) is None
    assert table.shared_tiling(x, (2, 3, 4)) is None  # blocks along three axes
    for length, is_shared in ((table.MOST_ELEMENTS - 1, True), (table.MOST_ELEMENTS, False)):
        assert (table.shared_tiling(torch.empty(length, device="meta"), ()) is not None) == is_shared


def test_addresses_of_tensors_that_share_a_launch_are_divisible_by_16():
    x = torch.zeros(16)
    assert x.data_ptr() % 16 == 0
    found = [table.are_aligned(x, None, x[begin:]) for begin in range(9)]
    assert found == [begin % 4 == 0 for begin in range(9)]
    assert table.are_aligned(None)
