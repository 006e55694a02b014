"""The batches that a recipe's ``module:callable`` returns."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from qtk.cli.imported import load_callable, what_it_did
from qtk.data.forward_pass import MOST_UNCOUNTED, Batch, length_of, read
from qtk.errors import ConfigError

MANY_BATCHES = 10_000
"""Batches of an evaluation without a length after which a warning says that it may be endless."""


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches ``(inputs, label)`` from a user's callable, which is called for each pass.

    Args:
        locator: ``module:callable``.
        where: the key in the recipe, for messages.
        num_batches: how many are taken; ``None``: all.
        labelled: whether a batch that is no pair is an error; else it is inputs alone, and its label ``None``.
    """

    locator: str
    where: str
    num_batches: int | None = None
    labelled: bool = True

    def open(self) -> tuple[Iterator[tuple[Batch, object]], int | None]:
        """The batches of one pass, and their number if the source has a length or ``num_batches`` says it.

        Raises: ConfigError if the source cannot be called or is not an iterable; during iteration, if a batch is not
            what it must be, or there are no batches. Warns if a source without a length may have no end.
        """
        source = load_callable(self.locator, where=self.where)
        if not isinstance(source, Iterable):
            raise ConfigError(f"{self.where}: {self.locator}() returned a {type(source).__name__}; "
                              "it must return an iterable of batches")
        count = min((number for number in (length_of(source), self.num_batches) if number is not None), default=None)
        batches = read(source, self.num_batches, unreadable=self._unreadable)
        return self._pairs(batches, is_finite=count is not None), count

    def require_end(self, most_uncounted: int = MOST_UNCOUNTED) -> None:
        """Checks that a calibration with these batches ends: reads them once, before any model runs.

        Nothing is read if the source has a length, or ``num_batches`` is given.

        Raises: ConfigError if there are more than ``most_uncounted``, or they cannot be read.
        """
        pairs, count = self.open()
        if count is None and any(index == most_uncounted for index, _ in enumerate(pairs)):
            raise ConfigError(f"{self.where}: {self.locator} has no length and gave more than {most_uncounted} "
                              "batches, so it may never end; say how many to take (data.num_batches; a few hundred "
                              "samples are enough), or return something with a length, as a list or a DataLoader")

    def _unreadable(self, index: int, error: BaseException) -> ConfigError:
        return ConfigError(f"{self.where}: {self.locator}, while batches are read, {what_it_did(error)}")

    def _pairs(self, batches: Iterable[object], *, is_finite: bool) -> Iterator[tuple[Batch, object]]:
        count = 0
        for count, batch in enumerate(batches, start=1):
            if count == MANY_BATCHES + 1 and not is_finite:
                warnings.warn(f"{self.where}: {self.locator} has no length and gave {MANY_BATCHES} batches so far; if "
                              "it never ends, stop, and say how many to take (data.num_batches, "
                              "data.num_evaluation_batches)", stacklevel=2)
            if isinstance(batch, (tuple, list)) and len(batch) == 2:
                yield batch[0], batch[1]
                continue
            if self.labelled:
                shown = f"{len(batch)} elements" if isinstance(batch, (tuple, list)) else f"type {type(batch).__name__}"
                raise ConfigError(f"{self.where}: batch {count - 1} of {self.locator} has {shown}; "
                                  "must be a pair (inputs, label)")
            yield batch, None
        if count == 0:
            raise ConfigError(f"{self.where}: {self.locator} gave no batch; return a list, a generator or a DataLoader")
