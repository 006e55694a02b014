"""Names in the user's code."""

import sys

import pytest

from qtk.cli.imported import imported, load_callable, search_path
from qtk.errors import ConfigError


def test_a_callable_is_found_also_behind_dots():
    assert imported("os.path:join", where="x")("a", "b")
    assert imported("collections:OrderedDict.fromkeys", where="x")("ab")


@pytest.mark.parametrize(
    ("locator", "said"),
    [
        ("os.path.join", "data.calibration: got 'os.path.join'; must be module:callable"),
        ("os.path:", "must be module:callable"),
        (":join", "must be module:callable"),
        ("no_such_module_at_all:f", "cannot import 'no_such_module_at_all'"),
        ("math:hypott", "math has no 'hypott'; did you mean 'hypot'"),
        ("math:pi", "math:pi is a float; it must be callable"),
    ],
)
def test_a_wrong_locator_is_answered_with_key_and_rule(locator, said):
    with pytest.raises(ConfigError, match=said):
        imported(locator, where="data.calibration")


def test_an_error_in_the_users_function_is_told(project):
    with pytest.raises(ConfigError, match=r"data: user_.*:broken\(\) raised KeyError: 'no such folder'"):
        load_callable(f"{project.module}:broken", where="data")


@pytest.mark.parametrize(("source", "said"), [
    ("import sys\nsys.exit()", r"x: importing 'failing_module' called sys\.exit\(None\), which ends the program"),
    ("1 / 0", "x: importing 'failing_module' raised ZeroDivisionError"),
    ("def f(:", "x: importing 'failing_module' raised SyntaxError"),
    ("import sys\ndef f():\n    sys.exit(0)", r"x: failing_module:f\(\) called sys\.exit\(0\)"),
])
def test_a_module_that_fails_or_ends_the_program_is_told(source, said, tmp_path):
    (tmp_path / "failing_module.py").write_text(source)
    with search_path(tmp_path), pytest.raises(ConfigError, match=said):
        load_callable("failing_module:f", where="x")
    sys.modules.pop("failing_module", None)


def test_the_search_path_is_as_before_afterwards(tmp_path):
    (tmp_path / "only_here_module.py").write_text("def f():\n    return 7\n")
    before = list(sys.path)
    with search_path(tmp_path):
        assert load_callable("only_here_module:f", where="x") == 7
    assert sys.path == before
