"""Writes a changed model into a folder; its weights go into a second file if the original has one."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir


def write_copy(model: ir.Model, file: Path, folder: Path) -> Path:
    """Writes ``model``, loaded from ``file`` and changed, into ``folder`` by the name of ``file``; returns its path."""
    copy, data = folder / file.name, f"{file.name}.data"
    ir.save(model, copy, external_data=data if file.with_name(data).exists() else None)
    return copy
