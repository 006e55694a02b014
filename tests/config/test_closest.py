"""Hints at names."""

from qtk.config.closest import closest

MANY = [f"name{index}" for index in range(40)] + ["relu"]


def test_few_names_are_all_listed():
    assert closest("x", ["b", "a"]) == "known: a, b"


def test_of_many_only_close_ones_are_named():
    assert closest("rleu", MANY) == "did you mean 'relu'?"
    assert closest("zzz", MANY) == "there are 41, none of them close"
