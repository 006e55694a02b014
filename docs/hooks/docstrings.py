"""Extension of griffe: what docstrings of qtk write for a reader of the code becomes Markdown."""

from __future__ import annotations

import re

import griffe


class DocstringMarkdown(griffe.Extension):
    """Doctests become code blocks, ``x`` becomes `x`, and ``Raises: X if …`` a paragraph."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
    """The docstring with its examples fenced."""
    text = re.sub(r"``([^`]+)``", r"`\1`", docstring)
    text = re.sub(r"^(?:>>> .*\n?)(?:.+\n?)*", lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text, flags=re.M)
    return re.sub(r"^(Raises|Returns|Shape): (?=\S)", r"**\1**: ", text, flags=re.M)
