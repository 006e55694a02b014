"""What compilers make of the kernels, by benchmarks/kernels/inspect_gpu.py: a GPU is not needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHIPS = {"90 H200": 16, "gfx942 MI300X": 8}
"""Elements of a tile that a thread has."""
STREAMS = {"forward": 2, "backward": 3, "backward, learned": 3, "min_max": 1, "many": 2, "many, backward": 3,
           "many, backward, learned": 3, "one of many, backward, learned": 3}
SIZES = {"float32": 4, "bfloat16": 2}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("code") / "code.json"
    command = [
        sys.executable, "benchmarks/kernels/inspect_gpu.py", "--chips", "sm_90", "gfx942", "--kinds", *SIZES,
        "--granularities", "tensor", "row", "last_axis", "block32", "--calls", *STREAMS, "candidate_errors", "--json",
        str(path),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_case_compiles_as_it_is_launched(found):
    """Numbers that are 1 become constants: the candidates of one scale compiled nowhere but in the interpreter."""
    assert len(found) == len(CHIPS) * len(SIZES) * 4 * (len(STREAMS) + 1)
    assert all(row["launches"] == 1 for row in found)


def test_nothing_is_spilled(found):
    assert [row for row in found if row["spilled"]] == []


def test_every_stream_is_read_and_written_128_bits_at_a_time(found):
    """Those of scales and of partial sums may be more, or less wide."""
    for row in found:
        if row["call"] in STREAMS:
            least = STREAMS[row["call"]] * CHIPS[row["chip"]] * SIZES[row["kind"]] // 16
            assert row["wide"] >= least, row


def test_one_true_division_an_element_and_one_ticket_a_program(found):
    for row in found:
        assert row["divisions"] == (0 if row["call"] == "min_max" else CHIPS[row["chip"]]), row
        assert row["atomics"] <= 1, row


def test_as_many_warps_are_resident_as_hide_the_latency_of_memory(found):
    """A quarter of the most; forward, which is called most often, half."""
    for row in found:
        if row["call"] in ("forward", "min_max", "many") and row["granularity"] != "last_axis":
            assert row["occupancy"] >= 0.375, row
        assert row["occupancy"] >= 0.125, row


def test_many_tensors_are_summed_in_the_layouts_of_each_alone(found):
    """The order of a sum decides its last bits."""
    alone, many = ({(row["chip"], row["kind"], row["granularity"]): row["sums"] for row in found if row["call"] == call}
                   for call in ("one of many, backward, learned", "many, backward, learned"))
    assert alone.keys() == many.keys()
    assert all(alone.values())
    for case, layouts in alone.items():
        assert many[case] == layouts, case
