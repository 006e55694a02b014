import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from qtk.report.difference import Difference
from qtk.report.timing import OpTime, Timing
from qtk.report.verdict import EXACT, OFF, ON, FileRun, Finding, Level, Verdict

SITES = (Difference("a:out", 10, 0.0, 0.0, 0.0, 0.0, math.inf), Difference("b:out", 10, 0.5, 0.1, 0.2, 3.0, 20.0))
TOTAL = Difference("outputs", 10, 0.5, 0.1, 0.2, 3.0, 20.0)
RUNS = (FileRun(OFF, "off", TOTAL, sites=SITES), FileRun(ON, "on", TOTAL),
        FileRun(EXACT, "exact", refusal="shared weight"))
FINDINGS = (Finding(Level.YELLOW, "slow", "wait"), Finding(Level.RED, "wrong", "export again"))


def verdict(findings=FINDINGS):
    return Verdict(Path("model.onnx"), "the simulation", RUNS, tuple(findings), 1000, 4000)


@pytest.mark.parametrize(("findings", "level"), [
    ((), Level.GREEN), (FINDINGS[:1], Level.YELLOW), (FINDINGS, Level.RED),
])
def test_the_level_is_that_of_the_most_serious_finding(findings, level):
    assert verdict(findings).level is level


def test_the_first_departure_is_the_first_site_that_differs():
    assert verdict().exact.first_departure.name == "b:out"
    assert verdict().optimized.first_departure is None


def test_everything_is_printed():
    text = str(verdict())
    for part in ("model.onnx: red", "0.250 of float's", "b:out", "exact x86 mode: shared weight", "refused",
                 "yellow: slow; wait", "red: wrong; export again"):
        assert part in text
    assert "a:out" not in text  # equal


def test_five_lines_come_first():
    timed = replace(RUNS[1], latency_ms=0.5, float_latency_ms=0.25, top1=0.975)
    result = replace(verdict(), runs=(RUNS[0], timed, RUNS[2]), timing=Timing(8, 8, 2, 4))
    assert result.summary() == [
        "model.onnx: red, compared with the simulation",
        "why: slow (and 1 more below)",
        "accuracy, optimizations on: 97.50% of top-1 equal, 10.00% of the outputs off by more than one step, "
        "SQNR 20.0 dB",
        "size: 1,000 bytes, 0.250 of float's",
        "latency: 0.5 ms, 2.00 × float (0.25 ms), batch 8, 2 threads",
    ]
    assert str(result).startswith("\n".join(result.summary()))
    assert "latency of batch 8, 2 threads" in str(result)
    assert len(verdict(()).summary()) == 3


def test_the_slowest_ops_are_shown():
    slow = replace(RUNS[1], slowest=(OpTime("act2.gate", ("QLinearAdd",), 10.2, 0.04, 0.27),))
    text = str(replace(verdict(), runs=(RUNS[0], slow)))
    assert "slowest ops" in text
    assert "act2.gate │ QLinearAdd │ 10.2 │      0.04 │         27%" in text
    assert replace(verdict(), runs=(slow,)).to_json()["runs"][0]["slowest"][0]["op"] == "act2.gate"


def test_a_refused_run_has_no_numbers():
    refused = verdict().run(EXACT)
    assert math.isnan(refused.differing)
    assert math.isnan(refused.sqnr_db)
    assert refused.max_difference_scales is None


def test_it_is_json():
    record = json.loads(json.dumps(verdict().to_json(), allow_nan=False))
    assert record["format"] == "qtk.verdict"
    assert record["runs"][2]["refusal"] == "shared weight"
    assert record["findings"][1] == {"level": "red", "cause": "wrong", "remedy": "export again"}


def test_a_few_values_that_differ_are_not_printed_as_none():
    sites = (Difference("a:out", 100_000, 0.00002, 0.0, 0.2, 0.99999, 80.0),)
    text = str(Verdict(Path("model.onnx"), "the simulation", (FileRun(OFF, "off", TOTAL, sites=sites),), (), 1000))
    assert "a:out: <0.01% of its values, by at most 1 step\n" in text + "\n"
    assert "│    <0.01% │    0.00% │" in text
