"""Latency of several runners of one model: medians of interleaved turns in changing order."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

from tqdm import tqdm

WARM_UP_S = 1.0
"""For so long a processor that was idle gets faster: its clock rises, and pages and thread pools are new."""


def median_latencies_ms(
    runners: Mapping[str, Callable[[], object]], *, turns: int, progress: bool = False,
    clock: Callable[[], float] | None = None,
) -> dict[str, float]:
    """The median time of each runner, which take turns, so that what slows the machine down slows down all of them.

    Each turn has an order of its own: what a runner leaves in caches and thread pools then meets all the others.

    >>> sorted(median_latencies_ms({"a": lambda: sum(range(9)), "b": lambda: None}, turns=3))
    ['a', 'b']

    Args:
        runners: name → a function that runs once.
        turns: how often each runs; before, turns that do not count warm up, one at least and a second of them.
        progress: show a bar, if it takes longer than seconds.
        clock: what tells the seconds; ``None``: the time that passes. ``time.process_time`` counts the CPU time of this
            process, which other processes on the machine do not add to; it is meant for runners of one thread.
    """
    seconds = time.perf_counter if clock is None else clock
    times: dict[str, list[float]] = {name: [] for name in runners}
    order, shuffle = list(runners.items()), random.Random(0).shuffle
    until = time.perf_counter() + WARM_UP_S
    _take_turn(order, seconds)
    while time.perf_counter() < until:
        _take_turn(order, seconds)
    for _ in tqdm(range(turns), desc="measuring latency", unit="turn", delay=2, disable=not progress):
        shuffle(order)
        for name, taken in _take_turn(order, seconds).items():
            times[name].append(taken)
    return {name: statistics.median(each) * 1000 for name, each in times.items()}


def _take_turn(order: list[tuple[str, Callable[[], object]]], seconds: Callable[[], float]) -> dict[str, float]:
    """The seconds that each took."""
    taken = {}
    for name, run in order:
        started = seconds()
        run()
        taken[name] = seconds() - started
    return taken
