"""The directory of the results of a run, which grows setting by setting."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from qtk.atomic import locked, staged_directory, write_file
from qtk.errors import ExportError
from qtk.report.summary import FLOAT, SUMMARY_JSON, SUMMARY_TXT, Score, Summary


class Results:
    """A context in which settings are finished, and written, one after the other.

    The directory appears with the first finished setting; until then an older one stays. A setting is there with all
    its files or not at all, and one that fails does not take the others with it. While the context lasts, no other run
    replaces the directory.

    Args:
        directory: where the results will be: ``<model>/<setting>/``, and the summaries if there is a metric.
        force: replace an existing directory.
        metric: name of the metric; ``None``: nothing is measured.
        measured_on: what it is measured on, in words.

    Raises: ExportError if the directory exists and ``force`` is off, or cannot be written; if no setting is finished,
        on exit the error of the first.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, force: bool, metric: str | None, measured_on: str = ""
    ) -> None:
        self._directory, self._force = Path(directory).absolute(), force
        self._metric, self._measured_on = metric, measured_on
        self._scores: dict[str, dict[str, Score]] = {}
        self._failures: dict[str, dict[str, Exception]] = {}
        self._stack, self._lock = ExitStack(), ExitStack()
        self._published = False

    def __enter__(self) -> Results:
        self._root = self._stack.enter_context(staged_directory(self._directory, force=self._force))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._lock.close()
        if self._published:
            return
        if error is None:
            error = next(iter(next(iter(self._failures.values())).values()))
        try:
            self._stack.__exit__(type(error), error, error.__traceback__)
        finally:
            if kind is None:
                raise error

    @property
    def summary(self) -> Summary:
        """The scores so far, and in words what failed."""
        failures = {model: {setting: f"{type(error).__name__}: {error}" for setting, error in errors.items()}
                    for model, errors in self._failures.items()}
        return Summary(self._metric or "", self._scores, failures, self._measured_on)

    @contextmanager
    def setting(self, model: str, setting: str) -> Iterator[Path]:
        """The folder that the body, and nobody else, may create; what an exception leaves of it is removed.

        An ``Exception`` is noted as the failure of this setting, and goes no further.
        """
        folder = self._root / model / setting
        try:
            yield folder
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, Exception):
                raise
            self.fail(model, setting, error)
        else:
            if setting != FLOAT:
                self._publish()

    def add(self, model: str, setting: str, score: Score) -> None:
        """Notes the score of the setting that is being finished."""
        self._scores.setdefault(model, {})[setting] = score

    def fail(self, model: str, setting: str, error: Exception) -> None:
        """Notes that a setting failed."""
        self._failures.setdefault(model, {})[setting] = error
        if self._published:
            self._write_summary()

    def _publish(self) -> None:
        self._write_summary()
        if not self._published:
            self._lock.enter_context(locked(self._root))  # the lock goes with the directory when it is renamed
            self._stack.close()
            self._root, self._published = self._directory, True

    def _write_summary(self) -> None:
        if self._metric is None:
            return
        record = json.dumps(self.summary.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
        for name, text in ((SUMMARY_JSON, record), (SUMMARY_TXT, self.summary.text())):
            try:
                write_file(self._root / name, f"{text}\n".encode())
            except OSError as error:
                raise ExportError(f"cannot write {self._root / name}: {error.strerror or error}; the settings before "
                                  "this one are complete") from error
