import builtins
import inspect

import pytest

from qtk import errors

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind is not errors.QtkError]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_error_is_a_qtk_error_and_a_builtin_and_says_when_it_is_raised(kind):
    assert issubclass(kind, errors.QtkError)
    others = [base for base in kind.__bases__ if base is not errors.QtkError]
    assert [getattr(builtins, base.__name__) for base in others] == others != []
    assert kind.__doc__


@pytest.mark.parametrize(("error", "line"), [
    (ValueError("one\ntwo"), "ValueError: one"), (KeyError(), "KeyError: "), (OSError("\n one"), "OSError: one"),
])
def test_the_first_line_of_an_error_has_its_type(error, line):
    assert errors.first_line(error) == line


def test_every_error_is_listed():
    assert {kind.__name__ for kind in KINDS} >= {
        "SpecError", "ConfigError", "CaptureError", "VerificationError", "CalibrationError", "NotCalibratedError",
        "CheckError", "EncodingError", "ExportError",
    }
