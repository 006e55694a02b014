"""Findings of pydantic in our words, for any schema."""

from typing import Annotated

import pytest
from pydantic import BaseModel, ConfigDict, Field

from qtk.config.schema import QuantConfig
from qtk.config.validate import validate
from qtk.errors import ConfigError


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = 1


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    parts: list[Inner | None] = []
    named: dict[str, Inner] = {}


def test_valid_data_comes_back_as_the_model():
    assert validate(Outer, {"parts": [{"size": 3}]}, source="file").parts == [Inner(size=3)]


def test_the_nearest_key_is_that_of_the_mapping_concerned():
    with pytest.raises(ConfigError, match=r"file: parts\[1\]\.sice: unknown key; did you mean 'size'\? known: size$"):
        validate(Outer, {"parts": [{}, {"sice": 3}]}, source="file")


@pytest.mark.parametrize("given", [None, 3, "text", ["a"]])
def test_the_top_must_be_a_mapping(given):
    with pytest.raises(ConfigError, match="file: a mapping of keys is expected at the top, got"):
        validate(Outer, given, source="file")


def test_long_values_are_cut():
    with pytest.raises(ConfigError) as caught:
        validate(Outer, {"parts": [{"size": "x" * 1000}]}, source="file")
    assert len(str(caught.value)) < 250


class Filled(BaseModel):
    sizes: Annotated[tuple[int, ...], Field(min_length=1)]


def test_a_list_is_not_called_too_short_for_the_mistakes_inside_it():
    with pytest.raises(ConfigError, match=r"^file: sizes\[0\]: got 'x'; must be a valid integer"):
        validate(Filled, {"sizes": ["x"]}, source="file")
    with pytest.raises(ConfigError, match=r"^file: sizes: got \[\]; needs at least 1 elements"):
        validate(Filled, {"sizes": []}, source="file")


def test_a_value_that_holds_itself_many_times_over_is_shown_in_part():
    value = ["x"] * 9
    for _ in range(30):
        value = [value] * 9
    with pytest.raises(ConfigError) as caught:
        validate(QuantConfig, {"version": value, "rules": value, "io": {"inputs": value}}, source="config")
    assert len(str(caught.value)) < 10_000
