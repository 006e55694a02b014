"""Latency of several runners of one model: medians of interleaved turns in changing order."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

from tqdm import tqdm


def median_latencies_ms(
    runners: Mapping[str, Callable[[], object]], *, turns: int, progress: bool = False
) -> dict[str, float]:
    """The median time of each runner, which take turns, so that what slows the machine down slows down all of them.

    Each turn has an order of its own: what a runner leaves in caches and thread pools then meets all the others.

    >>> sorted(median_latencies_ms({"a": lambda: sum(range(9)), "b": lambda: None}, turns=3))
    ['a', 'b']

    Args:
        runners: name → a function that runs once.
        turns: how often each runs; one more before, which does not count, warms up.
        progress: show a bar, if it takes longer than seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in runners}
    order, shuffle = list(runners.items()), random.Random(0).shuffle
    for turn in tqdm(range(turns + 1), desc="measuring latency", unit="turn", delay=2, disable=not progress):
        shuffle(order)
        for name, run in order:
            started = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(each) * 1000 for name, each in times.items()}
