"""What a latency is of, and the ops that are shown."""

from qtk.report.timing import OpTime, Timing, slowest, slowest_table

TIMES = {
    "slow": [("QLinearAdd", 9.0), ("QuantizeLinear", 1.0)], "large": [("QLinearConv", 4.0)],
    "quick": [("QGemm", 0.2)], "tiny": [("Reshape", 0.01)], "new": [("QuantizeLinear", 0.4)],
}


def test_what_loses_most_is_first_and_what_gains_little_is_left_out():
    ops = slowest(TIMES, {"slow": 0.1, "large": 8.0, "quick": 0.3, "tiny": 0.001})
    assert [each.op for each in ops] == ["slow", "new", "large"]
    assert ops[0] == OpTime("slow", ("QLinearAdd", "QuantizeLinear"), 10.0, 0.1, 10.0 / 14.61)
    assert ops[2].lost_ms == -4.0


def test_without_a_float_file_a_tenth_of_the_time_is_worth_a_row():
    assert [each.op for each in slowest(TIMES, None)] == ["slow", "large"]


def test_five_at_most():
    times = {str(number): [("QGemm", float(number))] for number in range(1, 9)}
    assert [each.op for each in slowest(times, dict.fromkeys(times, 0.0))] == list("87654")


def test_it_prints():
    text = slowest_table(slowest(TIMES, None), Timing(1, 1, 1, 2)).text()
    assert text.startswith("slowest ops, batch 1, 1 thread\n")
    assert "QLinearAdd, QuantizeLinear" in text
    assert "68%" in text
    assert str(Timing(1, None, 1, 2, "x [64, 1, 8]")) == "the file's fixed batch, x [64, 1, 8], 1 thread"
    assert slowest(TIMES, None)[0].to_json()["float_ms"] is None
    assert Timing(1, 64, None, 2).to_json() == {"asked": 1, "rows": 64, "threads": None, "cpus": 2, "shapes": ""}
