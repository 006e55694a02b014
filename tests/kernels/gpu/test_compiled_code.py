"""What compilers make of the kernels, by benchmarks/kernels/inspect_gpu.py: a GPU is not needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.kernels
ROOT = Path(__file__).parents[3]
CHIPS = "90 H200", "gfx942 MI300X"
STREAMS = {"forward": 2, "backward": 3, "backward, learned": 3, "min_max": 1, "extremes": 1, "minifloat": 2}
OF_ENDS = "min_max", "extremes"
WITHOUT_SUMS = "forward", "backward", "minifloat"
LOADS_OF_RANGES = 2 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 4
"""Of a scale and a zero point; Triton 3.8 writes each load twice."""
WITH_TAIL = "forward", "backward", "backward, learned", "minifloat"
SIZES = {"float32": 4, "bfloat16": 2}
SHAPES = "4096x1024", "4095x197"
"""The second has an odd number of elements, in rows of an odd length."""
MOST = {"forward": 21.5, "backward": 25, "backward, learned": 29, "min_max": 27.5, "extremes": 46.5,
        "candidate_errors": 605, "minifloat": 28}
"""Instructions an element of the first shape on an H200, 20 candidates together; about a tenth more than there are."""
MOST_OF_A_STREAM = {"forward": 13, "backward": 17, "backward, learned": 26, "min_max": 6.5, "extremes": 12,
                    "candidate_errors": 335, "minifloat": 21}
MOST_OF_ODD_ROWS = {"forward": (36, 66), "backward": (39, 82), "backward, learned": (62, 115), "min_max": (41, 71),
                    "extremes": (72, 121), "candidate_errors": (1015, 1270), "minifloat": (41, 74)}
"""Of the second shape by rows, on each chip."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("code") / "code.json"
    granularities = "tensor row last_axis block32"
    return inspected(path, "sm_90 gfx942", SIZES, granularities, [*STREAMS, "candidate_errors"], SHAPES)


def inspected(path, chips, kinds, granularities, calls, shapes):
    command = [
        sys.executable, "benchmarks/kernels/inspect_gpu.py", "--chips", *chips.split(), "--kinds", *kinds,
        "--granularities", *granularities.split(), "--calls", *calls, "--shapes", *shapes, "--json", str(path),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(path.read_text(encoding="utf-8"))


def is_odd(row):
    return row["columns"] % 16 != 0


def test_every_case_compiles_as_it_is_launched(found):
    """Numbers that are 1 become constants: the candidates of one scale compiled nowhere but in the interpreter."""
    granularities = 4 + 3  # rows of an odd length have no blocks of 32
    assert len(found) == len(CHIPS) * len(SIZES) * granularities * (len(STREAMS) + 1)
    assert all(row["launches"] == 1 for row in found)


def test_nothing_is_spilled(found):
    assert [row for row in found if row["spilled"]] == []


def test_nor_is_it_where_registers_are_fewest(tmp_path):
    """ptxas spilled 8 bytes for one more resident block, where what is used after a loop was computed before it."""
    calls = ["backward, learned"]
    found = inspected(tmp_path / "code.json", "sm_80 sm_90 sm_100", ["float32"], "block16 block128", calls, SHAPES[:1])
    assert len(found) == 3 * 2
    for row in found:
        assert row["spilled"] == row["spills_a_turn"] == 0, row


def test_every_stream_is_read_and_written_128_bits_at_a_time(found):
    """Those of scales and of partial sums may be more, or less wide."""
    for row in found:
        if row["call"] in STREAMS and not is_odd(row):
            assert row["wide"] >= least(row), row


def test_so_is_a_tensor_of_any_length_but_its_last_elements(found):
    rows = [row for row in found if is_odd(row) and row["granularity"] == "tensor" and row["call"] in STREAMS]
    assert len(rows) == len(STREAMS) * len(CHIPS) * len(SIZES)
    for row in rows:
        assert row["wide"] >= least(row), row
        if row["call"] in WITH_TAIL and row["call"] in WITHOUT_SUMS:
            assert row["narrow"] <= STREAMS[row["call"]] + LOADS_OF_RANGES, row


def test_so_are_rows_that_begin_at_any_address(found):
    """In tiles of rows, learned ranges took 160 to 182 instructions an element, extremes 142 to 262."""
    rows = [row for row in found if is_odd(row) and row["granularity"] == "row"]
    assert len(rows) == (len(STREAMS) + 1) * len(CHIPS) * len(SIZES)
    for row in rows:
        if row["call"] in STREAMS:
            assert row["wide"] >= least(row), row
        assert row["instructions"] <= MOST_OF_ODD_ROWS[row["call"]][CHIPS.index(row["chip"])], row


@pytest.mark.parametrize(
    ("call", "granularity", "streams", "most"),
    [("dynamic", "row", 2, (84, 118)), ("histogram", "tensor", 1, (26, 185))], ids=["dynamic", "histogram"],
)
def test_so_are_rows_quantized_dynamically_and_a_tensor_that_is_counted(call, granularity, streams, most, tmp_path):
    """Element by element rows took 174 and 299 instructions an element."""
    found = inspected(tmp_path / "code.json", "sm_90 gfx942", SIZES, granularity, [call], SHAPES[1:])
    assert len(found) == len(CHIPS) * len(SIZES)
    for row in found:
        chip = CHIPS.index(row["chip"])
        elements = (16, 8)[chip]  # of a thread
        assert row["wide"] >= streams * elements * SIZES[row["kind"]] // 16, row
        assert row["instructions"] <= most[chip], row
        assert row["spilled"] == 0, row


def least(row):
    return STREAMS[row["call"]] * turn(row) * SIZES[row["kind"]] // 16


def turn(row):
    """Elements that a thread reads at a time: of all streams together no more than its registers take."""
    if row["chip"] != CHIPS[0]:
        return 8
    if row["call"] == "candidate_errors":
        return 16
    return 16 if row["kind"] == "bfloat16" and row["call"] in WITHOUT_SUMS else 8


def test_no_more_instructions_than_there_were(found):
    """A scalar load or a division of a turn by 64 bits would be seen here."""
    for row in found:
        if row["chip"] == CHIPS[0] and not is_odd(row):
            most = MOST_OF_A_STREAM if row["granularity"] == "tensor" else MOST
            assert row["instructions"] <= most[row["call"]], row


def test_no_division_an_element_and_one_ticket_a_program(found):
    """One division for each scale of a thread, its inverse. Extremes draw two tickets, and count what is rare."""
    for row in found:
        scales = 16 // SIZES[row["kind"]] if row["granularity"] == "last_axis" else 4
        tail = row["kernel"].endswith("_rows_kernel") or (is_odd(row) and row["granularity"] == "tensor")
        assert row["divisions"] <= (0 if row["call"] in OF_ENDS else scales + tail), row
        assert row["atomics"] <= (6 if row["call"].endswith("extremes") else 1), row


def test_as_many_warps_are_resident_as_hide_the_latency_of_memory(found):
    """A quarter of the most, of odd rows an eighth, but a third of float32 streams; what is called most often, half."""
    for row in found:
        if row["call"] in ("forward", "min_max") and row["granularity"] != "last_axis" and not is_odd(row):
            assert row["occupancy"] >= 0.5, row
        if row["kernel"].endswith("_rows_kernel"):
            assert row["occupancy"] >= (0.375 if row["kind"] == "float32" else 0.25), row
        assert row["occupancy"] >= (0.125 if is_odd(row) else 0.25), row


def test_instructions_are_counted_and_the_longer_of_memory_and_issue_is_the_roofline(found):
    """Fewer than five an element would be another loop than the main one."""
    for row in found:
        assert 5 <= row["issues"] <= row["instructions"], row
        assert row["roofline_us"] == max(row["memory_us"], row["issue_us"]), row
        assert row["bound"] == ("memory" if row["memory_us"] >= row["issue_us"] else "instructions"), row
        streams = STREAMS.get(row["call"], 1)
        assert row["bytes"] == streams * SIZES[row["kind"]], row
