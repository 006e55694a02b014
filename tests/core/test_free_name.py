from qtk.core.free_name import free_name


def test_the_first_ordinal_that_is_free():
    assert free_name("a", {"a", "a_1"}) == "a_2"
    assert free_name("a", {"a", "a@2"}, "@") == "a@1"


def test_a_name_that_is_free_stays():
    assert free_name("a", {"b": 1}) == "a"
