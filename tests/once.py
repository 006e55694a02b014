"""Makes what several processes of one run of the suite need once, and hands it to all of them as a file."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

VARIABLE = "QTK_TEST_RUN"
"""Names the folder of a run, which processes inherit."""


def begin() -> Path | None:
    """Makes the folder of this run; ``None`` where a parent process has made it."""
    if VARIABLE in os.environ:
        return None
    folder = Path(tempfile.mkdtemp(prefix="qtk-tests-"))
    os.environ[VARIABLE] = str(folder)
    return folder


def end(folder: Path) -> None:
    del os.environ[VARIABLE]
    shutil.rmtree(folder, ignore_errors=True)


def once(name: str, make: Callable[[], T]) -> T:
    """What ``make`` returns, pickled: the first process of a run that asks for ``name`` makes it, others wait and read.

    The process that makes it reads it too, so that no test sees another object than the next process would.
    """
    if VARIABLE not in os.environ:
        return make()
    path = Path(os.environ[VARIABLE]) / name
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = make()
            torch.save(made, f"{path}.part")
            os.replace(f"{path}.part", path)
            del made
    return torch.load(path, weights_only=False)
