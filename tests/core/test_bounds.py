import pytest

from qtk.core.bounds import check_count
from qtk.errors import CalibrationError


@pytest.mark.parametrize(
    "value", [0, -1, 11, 10**9, 10**5000, -(10**5000), 1.5, True, None, "3"], ids=lambda value: type(value).__name__
)
def test_what_is_no_count_up_to_the_bound_is_an_error(value):
    with pytest.raises(CalibrationError, match="steps must be an integer from 1 to 10, got "):
        check_count("steps", value, 10)


def test_both_ends_belong_to_it():
    check_count("steps", 1, 10)
    check_count("steps", 10, 10)
