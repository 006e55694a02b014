"""Names in the user's code."""

import sys

import pytest

from qtk.cli.imported import called, imported, search_path
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
        called(f"{project.module}:broken", where="data")


def test_the_search_path_is_as_before_afterwards(tmp_path):
    (tmp_path / "only_here_module.py").write_text("def f():\n    return 7\n")
    before = list(sys.path)
    with search_path(tmp_path):
        assert called("only_here_module:f", where="x") == 7
    assert sys.path == before
