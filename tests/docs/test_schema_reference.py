"""The generated reference has every key of a config and of a recipe, each with its meaning."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from types import ModuleType

import pytest
from pydantic import BaseModel, Field

from qtk.cli.recipe import Recipe
from qtk.config import runtime, schema, tensor_setting
from qtk.config.schema import QuantConfig
from tests.docs.pages import DOCS

sys.path.insert(0, str(DOCS / "hooks"))
generator = import_module("schema_reference")
sys.path.pop(0)


def classes(*modules: ModuleType) -> set[type[BaseModel]]:
    """The public models that modules define."""
    return {
        value for module in modules for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, BaseModel) and value.__module__ == module.__name__
        and not name.startswith("_")
    }


def test_every_model_is_reached_from_its_root() -> None:
    assert set(generator.models(QuantConfig)) == classes(schema, runtime, tensor_setting)
    assert set(generator.models(Recipe)) == classes(import_module("qtk.cli.recipe"))


@pytest.mark.parametrize("root", [QuantConfig, Recipe])
def test_every_key_is_there_with_values_and_a_meaning(root: type[BaseModel]) -> None:
    text = generator.reference(root)
    for model in generator.models(root):
        section = text.partition(f"\n## {model.__name__}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.*) \| (.+) \|$", section, re.MULTILINE)
        assert [row[0] for row in rows] == list(model.model_fields)
        assert [row for row in rows if "any" in re.findall(r"\w+", row[1]) or len(row[3]) < 8] == []


def test_every_link_to_a_model_leads_to_its_section() -> None:
    for root in (QuantConfig, Recipe):
        text = generator.reference(root)
        headings = {heading.lower() for heading in re.findall(r"^## (\w+)$", text, re.MULTILINE)}
        assert set(re.findall(r"\]\(#(\w+)\)", text)) <= headings


def test_a_key_without_a_meaning_is_found() -> None:
    class Part(BaseModel):
        """A part.

        Args:
            size: how large it is,
                in bytes.
        """

        size: int = Field(ge=1)
        silent: str = "x"

    assert generator.described(Part) == ("A part.", {"size": "how large it is,\n        in bytes."})
    assert list(generator.keys(Part)) == [("size", "integer ≥ 1", "**required**"), ("silent", "text", '`"x"`')]
    generator.INTRODUCTIONS[Part] = ("Part", "")
    with pytest.raises(KeyError, match="silent"):
        generator.reference(Part)
