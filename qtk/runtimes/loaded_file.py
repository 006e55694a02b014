"""What a runtime is to the verdict: a file that it has loaded, runs, times and counts the operators of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qtk.report.runtime_nodes import RuntimeNodes


class LoadedFile(Protocol):
    """A file in a runtime."""

    @property
    def runtime(self) -> str:
        """The runtime, its version and its settings."""

    @property
    def inputs(self) -> Sequence[str]:
        """The names of the inputs, in order."""

    @property
    def outputs(self) -> Sequence[str]:
        """The names of the outputs, in order."""

    @property
    def sites(self) -> Sequence[str]:
        """The names of the sites whose values ``run`` returns beside the outputs, in graph order."""

    def run(self, inputs: Mapping[str, Tensor], *, sites: bool = False) -> dict[str, Tensor]:
        """The values of the outputs by name, and of the sites, if asked, with a first axis of the calls that it took.

        Raises: whatever the runtime raises.
        """

    def timed(self, inputs: Mapping[str, Tensor]) -> Callable[[], object]:
        """Returns what runs the file on inputs that the runtime has already taken, for its latency."""

    def nodes(self) -> RuntimeNodes | None:
        """Returns what the runtime executes; ``None`` if it does not say."""


@dataclass(frozen=True, slots=True)
class SiteRows:
    """A site of a loaded file.

    Args:
        site: its name.
    """

    site: str

    @property
    def step(self) -> int:
        return 0

    @property
    def name(self) -> str:
        return self.site

    def like(self, value: Tensor, reference: Tensor) -> Tensor | None:
        """The values in the layout of ``reference``. Shape: ``value`` [calls, …], the layout of the file behind."""
        return rows_like(value, reference)


def rows_like(rows: Tensor, reference: Tensor) -> Tensor | None:
    """The values that several calls returned, in the layout of a reference; ``None`` if they have no such layout.

    A file may have the channels last, and leading axes joined; calls are rows along one axis of the reference. Where
    several layouts have its shape, the nearest one is meant.

    >>> reference = torch.arange(24.0).reshape(2, 3, 4, 1)     # two rows, three channels
    >>> rows = reference.permute(0, 2, 3, 1).unsqueeze(1)      # channels last, one row a call
    >>> torch.equal(rows_like(rows, reference), reference)
    True

    Shape: rows [calls, …]; result as ``reference``.
    """
    calls = len(rows)
    if rows.numel() != reference.numel():
        return None
    found: list[Tensor] = []
    axes: list[int | None] = [axis for axis, length in enumerate(reference.shape) if calls > 1 and length == calls]
    for axis in axes or [None]:
        shape = reference.shape if axis is None else torch.Size(
            [1 if each == axis else length for each, length in enumerate(reference.shape)])
        layouts = [[row, *([row.movedim(-1, 1), row.movedim(-1, 0)] if row.ndim > 2 else [])] for row in rows]
        fitting = [index for index, each in enumerate(layouts[0]) if each.shape == shape] if calls else []
        for index in fitting:
            parts = [each[index] for each in layouts]
            found.append(parts[0] if axis is None else torch.cat(parts, axis))
        if not fitting and calls and layouts[0][0].numel() == shape.numel():
            parts = [each[0].reshape(shape) for each in layouts]
            found.append(parts[0] if axis is None else torch.cat(parts, axis))
    found = [each for each in found if each.shape == reference.shape]
    if len(found) < 2:
        return found[0] if found else None
    return min(found, key=lambda each: float((each.double() - reference.double()).abs().nan_to_num().sum()))
