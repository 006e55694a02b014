"""Profiles of hypothesis: short where slow tests are left out, long where they run; and the count at the end."""

from pathlib import Path

from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings

from tests.fuzz.fuzzing import SHARES, TRIED

HERE = Path(__file__).parent
EXAMPLES = {"short": 60, "long": 600}


def pytest_collection_modifyitems(config, items):
    name = "long" if config.getoption("door") == "all" else "short"
    tests = {item.function for item in items if item.path.parent == HERE and is_hypothesis_test(item.function)}
    for test in tests:
        examples = max(3, int(EXAMPLES[name] * SHARES.get(test.__name__, 1.0)))
        settings(max_examples=examples, deadline=None, phases=set(Phase) - {Phase.explain}, database=None,
                 derandomize=name == "short", suppress_health_check=list(HealthCheck))(test)


def pytest_terminal_summary(terminalreporter):
    if TRIED:
        failures = {name: TRIED[name] for name in ("raw", "hangs", "silent")}
        suites = {name: count for name, count in TRIED.items() if name not in failures}
        terminalreporter.write_line(f"fuzz: {sum(suites.values())} inputs tried {suites}; {failures}")
