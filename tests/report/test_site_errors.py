import math

from qtk.report.site_errors import SiteError, SiteErrors


def error(site, own, accumulated=10.0):
    return SiteError(site, accumulated, 1.0, own_sqnr_db=own)


def test_the_worst_own_error_is_first_and_nan_last():
    errors = SiteErrors.ranked([error("a", 20.0), error("b", math.nan), error("c", -math.inf), error("d", 20.0, 5.0),
                                error("e", math.inf)])
    assert [each.site for each in errors] == ["c", "d", "a", "e", "b"]


def test_sites_of_nan_are_in_front_in_order_of_execution_and_the_first_is_marked():
    broken = [SiteError(site, math.nan, 1.0, own_sqnr_db=own, not_finite=count) for site, own, count in (
        ("log:out", 30.0, 2), ("mul:out", 10.0, 7))]
    errors = SiteErrors.ranked([error("a", 20.0), broken[0], error("b", 3.0), broken[1]])
    assert [each.site for each in errors] == ["log:out", "mul:out", "b", "a"]
    rows = str(errors).splitlines()
    assert rows[0].endswith("NaN or infinite values begin at log:out: leave what log:out reads in float")
    assert [row.split("│")[-1].strip() for row in rows[3:]] == ["2, the first", "7", "", ""]
    assert "not finite" not in str(SiteErrors.ranked([error("a", 20.0)]))


def test_it_is_a_list_that_prints_as_a_table():
    errors = SiteErrors.ranked([error("a", 20.0), error("b", 3.0)])
    assert isinstance(errors, list)
    assert errors == [error("b", 3.0), error("a", 20.0)]
    assert isinstance(errors.top(1), SiteErrors)
    assert "a " not in str(errors.top(1))
    assert "3.0 dB" in str(errors.top(1))
    assert repr(errors) == "SiteErrors(b 3.0 dB, a 20.0 dB; 2 sites)"
