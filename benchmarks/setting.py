"""Where and with what a benchmark ran."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch


def commit() -> str:
    """The commit, with ``*`` behind it if the working tree holds changes."""
    shown = subprocess.run(
        ["git", "describe", "--always", "--dirty=*", "--abbrev=12", "--exclude=*"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )
    return shown.stdout.strip() or "unknown"


def threads(text: str) -> int:
    """An argument that sets the number of threads."""
    count = int(text)
    torch.set_num_threads(count)
    return count
