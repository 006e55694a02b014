"""Imports qtk before pytest collects a file of it, which would run a second time and register its operators twice.

``--door`` says how much of the suite runs: what ``make quick``, ``make test`` and ``make test-all`` pass.
"""

import os
from collections import defaultdict
from pathlib import Path

import qtk  # noqa: F401
from tests.kernels.passed import have_passed

LEFT_OUT = {"quick": {"medium", "slow", "kernels"}, "test": {"slow"}, "all": set()}
"""Door → the marks of tests that it leaves out."""

OF_KERNELS = {Path(__file__).parent / "tests" / room for room in ("ops", "numerics")}
"""Where tests run that have passed with the kernels as they are: of each function ``make test`` runs one."""


def pytest_addoption(parser):
    parser.addoption("--door", choices=list(LEFT_OUT), default="test", help="how much runs: quick, test (default), all")


def pytest_collection_modifyitems(config, items):
    door = config.getoption("door")
    is_emulated = "QTK_EMULATE_GPU" in os.environ  # these tests themselves are asked for
    left_out = LEFT_OUT[door] - ({"kernels"} if is_emulated else set())
    deselected = [item for item in items if any(marker.name in left_out for marker in item.iter_markers())]
    if door != "all" and not is_emulated:
        deselected += _beyond_samples([item for item in items if item.get_closest_marker("sample") is not None])
    if door == "test" and not is_emulated and have_passed():
        deselected += _but_canaries(item for item in items if item.get_closest_marker("kernels") is not None)
        deselected += _but_first(item for item in items if item.path.parent in OF_KERNELS)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        positions = set(map(id, deselected))
        items[:] = [item for item in items if id(item) not in positions]


def _beyond_samples(items):
    """The cases of each function but so many as its mark says, spread evenly over all."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for function in cases.values():
        (count,) = function[0].get_closest_marker("sample").args
        kept = {round(index * (len(function) - 1) / max(count - 1, 1)) for index in range(count)}
        yield from (item for index, item in enumerate(function) if index not in kept)


def _but_first(items):
    """The cases of each function but the first."""
    functions = set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        if function in functions:
            yield item
        functions.add(function)


def _but_canaries(items):
    """The tests but the first case of each function whose mark says ``canary=True``."""
    canaries, others = [], []
    for item in items:
        (canaries if item.get_closest_marker("kernels").kwargs.get("canary", False) else others).append(item)
    yield from (*others, *_but_first(canaries))
