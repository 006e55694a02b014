import math

from qtk.report.sensitivities import Sensitivities, Sensitivity


def test_the_largest_increase_is_first_and_it_stays_a_list():
    rows = [Sensitivity(name, (name,), rise, math.nan, False, rise) for name, rise in (("a", 1.0), ("b", 3.0))]
    found = Sensitivities(rows, float_loss=0.0, loss=4.0)
    assert isinstance(found, list)
    assert [row.name for row in found] == ["b", "a"]
    assert [row.name for row in found.top(1)] == ["b"]
    assert "estimate" in str(found)
    assert repr(found) == "Sensitivities(b +3.00e+00, a +1.00e+00; 2 rows)"


def test_estimates_alone_say_that_nothing_was_measured():
    found = Sensitivities([Sensitivity("a", ("a",), 1.0, math.nan, False, 1.0)], float_loss=0.5, loss=math.nan)
    assert str(found).startswith("loss 0.5 in float, not measured quantized\n")
