"""The stages of an export on one progress bar."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

from tqdm import tqdm

Begin: TypeAlias = Callable[[str], object]
"""Is told the name of each stage when it begins."""


def unseen(stage: str) -> None:
    """Shows nothing."""


class Stages:
    """Shows on a bar which stage runs, and how many are done.

    >>> with Stages(2, progress=False) as stages:
    ...     stages.begin("encodings.json")
    ...     begin = stages.of("model.onnx")
    ...     begin("writing")
    >>> stages.begun
    ['encodings.json', 'model.onnx: writing']

    Args:
        total: how many stages there are at most.
        progress: show the bar.
    """

    def __init__(self, total: int, *, progress: bool) -> None:
        self._bar: tqdm[Any] = tqdm(total=total, desc="exporting", unit="stage", mininterval=0, disable=not progress)
        self.begun: list[str] = []

    def begin(self, stage: str) -> None:
        """Ends the stage that runs, and begins another."""
        if self.begun:
            self._bar.update()
        self.begun.append(stage)
        self._bar.set_postfix_str(stage)

    def of(self, file: str) -> Begin:
        """Returns what begins the stages of a file."""
        return partial(self._begin_of, file)

    def _begin_of(self, file: str, stage: str) -> None:
        self.begin(f"{file}: {stage}")

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        """Closes the bar: full, unless a stage failed."""
        if error is None and self.begun:
            self._bar.set_postfix_str("", refresh=False)
            self._bar.total = len(self.begun)
            self._bar.update()
        self._bar.close()
