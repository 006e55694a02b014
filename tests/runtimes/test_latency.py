import pytest

from qtk.runtimes import latency

WARM_UP_S = latency.WARM_UP_S  # before conftest shortens it


def test_runners_take_turns_and_the_first_turn_does_not_count(monkeypatch):
    order = []
    now = [0.0]

    def runner(name, first, later):
        def run():
            now[0] += later if name in order else first
            order.append(name)
        return run

    monkeypatch.setattr(latency.time, "perf_counter", lambda: now[0])
    found = latency.median_latencies_ms({"a": runner("a", 9.0, 0.001), "b": runner("b", 9.0, 0.002)}, turns=9)
    turns = list(zip(order[::2], order[1::2], strict=True))
    assert [sorted(turn) for turn in turns] == [["a", "b"]] * 10
    assert len(set(turns)) == 2, "the order never changed"
    assert found == pytest.approx({"a": 1.0, "b": 2.0})


def test_a_second_of_turns_warms_up(monkeypatch):
    now = [0.0]

    def run():
        now[0] += 0.010 if now[0] < 0.5 else 0.001  # the clock of the processor rises after half a second

    monkeypatch.setattr(latency, "WARM_UP_S", WARM_UP_S)
    monkeypatch.setattr(latency.time, "perf_counter", lambda: now[0])
    assert latency.median_latencies_ms({"a": run}, turns=3) == pytest.approx({"a": 1.0})
    assert now[0] >= WARM_UP_S


def test_another_clock_tells_the_time_of_the_turns():
    now = [0.0]

    def run():
        now[0] += 0.004

    assert latency.median_latencies_ms({"a": run}, turns=3, clock=lambda: now[0]) == pytest.approx({"a": 4.0})
