import itertools

from qtk.workflow import latency


def test_runners_take_turns_and_the_first_turn_does_not_count(monkeypatch):
    order = []
    clock = itertools.chain([0.0, 9.0], itertools.cycle([0.0, 0.001, 0.0, 0.002]))
    monkeypatch.setattr(latency.time, "perf_counter", lambda: next(clock))
    found = latency.median_latencies_ms({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, turns=3)
    assert order == ["a", "b"] * 4
    assert found == {"a": 1.0, "b": 2.0}
