"""Imports qtk before pytest collects a file of it, which would run a second time and register its operators twice.

``--door`` says how much of the suite runs: what ``make quick``, ``make test`` and ``make test-all`` pass.
"""

import os

import qtk  # noqa: F401
from tests.kernels.passed import have_passed

LEFT_OUT = {"quick": {"medium", "slow", "kernels"}, "test": {"slow"}, "all": set()}
"""Door → the marks of tests that it leaves out."""


def pytest_addoption(parser):
    parser.addoption("--door", choices=list(LEFT_OUT), default="test", help="how much runs: quick, test (default), all")


def pytest_collection_modifyitems(config, items):
    door = config.getoption("door")
    is_emulated = "QTK_EMULATE_GPU" in os.environ  # these tests themselves are asked for
    left_out = LEFT_OUT[door] | ({"kernels"} if door == "test" and have_passed() else set())
    left_out -= {"kernels"} if is_emulated else set()
    deselected = [item for item in items if any(marker.name in left_out for marker in item.iter_markers())]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        positions = set(map(id, deselected))
        items[:] = [item for item in items if id(item) not in positions]
