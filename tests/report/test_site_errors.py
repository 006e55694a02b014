import math

from qtk.report.site_errors import SiteError, SiteErrors


def error(site, own, accumulated=10.0):
    return SiteError(site, accumulated, 1.0, own_sqnr_db=own)


def test_the_worst_own_error_is_first_and_nan_last():
    errors = SiteErrors.ranked([error("a", 20.0), error("b", math.nan), error("c", -math.inf), error("d", 20.0, 5.0),
                                error("e", math.inf)])
    assert [each.site for each in errors] == ["c", "d", "a", "e", "b"]


def test_it_is_a_list_that_prints_as_a_table():
    errors = SiteErrors.ranked([error("a", 20.0), error("b", 3.0)])
    assert isinstance(errors, list)
    assert errors == [error("b", 3.0), error("a", 20.0)]
    assert isinstance(errors.top(1), SiteErrors)
    assert "a " not in str(errors.top(1))
    assert "3.0 dB" in str(errors.top(1))
    assert repr(errors) == "SiteErrors(b 3.0 dB, a 20.0 dB; 2 sites)"
