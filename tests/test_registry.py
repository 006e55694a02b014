from types import SimpleNamespace

import pytest

from qtk.errors import ConfigError
from qtk.registry import Registry, did_you_mean, nearest


@pytest.fixture
def schemes():
    registry = Registry("scheme")
    registry.add("min_max", 1, aliases=("post_training_tf", "minmax"))
    registry.add("mse", 2)
    return registry


def test_a_value_is_found_by_name_and_alias(schemes):
    assert schemes["min_max"] == schemes["post_training_tf"] == 1
    assert schemes.canonical("minmax") == "min_max"
    assert "minmax" in schemes
    assert "nothing" not in schemes


def test_it_lists_names_not_aliases(schemes):
    assert list(schemes) == ["min_max", "mse"]
    assert len(schemes) == 2
    assert dict(schemes) == {"min_max": 1, "mse": 2}


def test_an_unknown_name_gets_the_nearest_and_all(schemes):
    with pytest.raises(ConfigError) as caught:
        schemes["min_mux"]
    for word in ("scheme", "'min_mux'", "did you mean 'min_max'?", "mse", "post_training_tf"):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["min_max", "minmax"])
def test_a_name_is_given_once(schemes, name):
    with pytest.raises(AssertionError, match="twice"):
        schemes.add(name, 3)
    with pytest.raises(AssertionError, match="twice"):
        schemes.add("new", 3, aliases=(name,))


MANY = [f"name{index}" for index in range(80)] + ["relu", "relu6"]


def test_of_many_names_only_the_closest_are_named():
    assert nearest("rleu", MANY) == "did you mean 'relu' or 'relu6'?"
    assert nearest("zzz", MANY) == "there are 82, none of them close"


def test_nearest_hints_only_at_what_is_close():
    assert did_you_mean("zzz", ["mse", "min_max"]) == ""
    assert nearest("mse_", ["mse", "min_max"]).startswith("did you mean 'mse'?")
    assert nearest("zzz", ["mse", "min_max"]) == "known: min_max, mse"


def test_a_made_value_is_made_once_when_its_name_is_first_used(monkeypatch):
    imported = []
    monkeypatch.setattr("importlib.import_module", lambda name: imported.append(name) or SimpleNamespace(Mse=object))
    registry = Registry("scheme")
    registry.add_made("mse", "schemes.mse", "Mse", aliases=("noise",))
    assert "noise" in registry
    assert imported == []
    assert registry["mse"] is registry["noise"]
    assert imported == ["schemes.mse"]
