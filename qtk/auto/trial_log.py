"""Finished trials on disk, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from qtk.atomic import write_file
from qtk.auto.choices import Choices
from qtk.auto.ranking import Ranking
from qtk.errors import ConfigError

FILE = "trials.json"


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a trial.

    Args:
        seconds: how long it took.
        error: of the outputs, relative; ``None`` if it failed.
        drop: of the metric; ``None`` if it was not evaluated.
        failure: why it failed; ``None`` if it did not.
        size_bytes: of the parameters; ``None`` if it failed.
        run_time: about how long a call takes over float's; ``None`` if it failed.
        scores: of the samples, where ``evaluate`` gives one for each.
    """

    seconds: float
    error: float | None = None
    drop: float | None = None
    failure: str | None = None
    size_bytes: int | None = None
    run_time: float | None = None
    scores: list[float] | None = None


class TrialLog:
    """Choices → result, written after every trial.

    Args:
        directory: where; ``None``: nowhere.
        run: what tells this run from others: settings, and numbers that follow from model and data.

    Raises: ConfigError if the directory holds another run, or a file that cannot be read.
    """

    def __init__(self, directory: Path | None, run: Mapping[str, object]) -> None:
        self._path = None if directory is None else directory / FILE
        self._run = json.loads(json.dumps(run))
        self._results: dict[str, Measured] = {}
        self._rankings: dict[str, Ranking] = {}
        if self._path is not None and self._path.exists():
            self._read(self._path)
        try:
            self._write()
        except OSError as error:
            raise ConfigError(f"{directory} cannot hold the trials ({error}); pass another directory") from error

    def find(self, choices: Choices) -> Measured | None:
        return self._results.get(_key(choices))

    def add(self, choices: Choices, measured: Measured) -> None:
        self._results[_key(choices)] = measured
        self._write()

    def ranking(self, choices: Choices) -> Ranking | None:
        """The ranking of the sites of these choices; ``None`` as long as nobody has ranked them."""
        return self._rankings.get(_key(choices))

    def add_ranking(self, choices: Choices, ranking: Ranking) -> None:
        self._rankings[_key(choices)] = ranking
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            trials = [{"choices": json.loads(key), **asdict(each)} for key, each in self._results.items()]
            rankings = [{"choices": json.loads(key), "recovered": each.recovered, "alone": each.alone}
                        for key, each in self._rankings.items()]
            content = {"run": self._run, "trials": trials, "rankings": rankings}
            write_file(self._path, json.dumps(content).encode())

    def _read(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            run = content["run"]
            for record in content["rankings"]:
                recovered, alone = tuple(map(str, record["recovered"])), dict(record["alone"])
                self._rankings[_key(Choices.from_json(record["choices"]))] = Ranking(recovered, alone)
            for record in content["trials"]:
                choices = Choices.from_json(record.pop("choices"))
                self._results[_key(choices)] = Measured(**record)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} holds no trials that can be read ({error}); delete it, or pass another "
                              "directory") from error
        different = [key for key, value in self._run.items() if run.get(key) != value]
        if different:
            raise ConfigError(f"{path} is of another run ({', '.join(different)} differ); delete it, or pass another "
                              "directory")


def _key(choices: Choices) -> str:
    return json.dumps(choices.to_json())
