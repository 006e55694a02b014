import pytest

from qtk.calls.served_sizes import ALL, BATCH, GIVEN, STATIC, ServedSizes, SizeLimit
from qtk.errors import CaptureError

EVEN = SizeLimit("s7 % 2 == 0 and s77 > s7", (("s7", ("x", 1)), ("s77", ("x", 0))))


def test_a_limit_is_written_with_the_names_of_inputs():
    assert str(EVEN) == "x.shape[1] % 2 == 0 and x.shape[0] > x.shape[1]"
    assert EVEN.holds({("x", 0): 5, ("x", 1): 4})
    assert not EVEN.holds({("x", 0): 5, ("x", 1): 3})


def test_a_limit_that_does_not_hold_is_an_error_with_the_lengths_and_the_condition():
    sizes = ServedSizes(limits=(SizeLimit("s0 > 3", (("s0", ("x", 0)),)),))
    sizes.check({("x", 0): 4})
    with pytest.raises(CaptureError, match=r"x\.shape\[0\] is 3, .* only where x\.shape\[0\] > 3; pass inputs of such"):
        sizes.check({("x", 0): 3})


def test_axes_of_one_name_have_one_length():
    sizes = ServedSizes(names={("x", 0): "batch", ("x", 1): "frames", ("h", 1): "batch"})
    sizes.check({("x", 0): 4, ("x", 1): 9, ("h", 1): 4})
    with pytest.raises(CaptureError, match=r"x\.shape\[0\] is 4 and h\.shape\[1\] is 5; both are 'batch'"):
        sizes.check({("x", 0): 4, ("x", 1): 9, ("h", 1): 5})


@pytest.mark.parametrize("asked", [BATCH, ALL, GIVEN, STATIC])
@pytest.mark.parametrize("axis", [("x", 0), ("x", 1)])
@pytest.mark.parametrize("size", [1, 24])
@pytest.mark.parametrize("place", ["", "encoder.pool"])
def test_no_remedy_names_what_was_done_already(asked, axis, size, place):
    text = ServedSizes(asked, place).remedy(axis, size)
    tried = asked == ALL or (asked == BATCH and axis[1] == 0)
    assert ('dynamic_shapes="all"' in text) == (not tried and asked != GIVEN)
    assert ("of 2 or more" in text) == (size == 1)
    assert ("modules_to_exclude=['encoder.pool']" in text) == (tried and size > 1 and place != "")


def test_why_an_axis_is_fixed_is_told():
    sizes = ServedSizes(ALL, fixed={("x", 1): "the loop over it is unrolled"})
    assert sizes.remedy(("x", 1), 24).startswith("axis 1 is fixed: the loop over it is unrolled; pass inputs with 24")
