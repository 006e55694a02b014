"""What the exporter of language models needs of a tokenizer."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Tokenizer(Protocol):
    """Writes the files of a tokenizer into a folder, as those of transformers do."""

    def save_pretrained(self, folder: str) -> object:
        """Writes the files."""
        ...
