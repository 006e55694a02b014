"""``Sequences``: batches of several sequences one after the other, for models with states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeAlias

from qtk.errors import CalibrationError
from qtk.public import public

Reset: TypeAlias = int | Callable[[Any], bool]
"""Where a sequence begins: every so many batches, or a function from a batch that says whether it is a first one."""


@public
class Sequences:
    """Says where a sequence of batches begins: there a model with states takes the states that the batch brings.

    Every function that takes data takes them, ``qtk.quantize`` too; without them, all batches are the steps of one
    sequence. ``compute_encodings(data, reset=3)`` is short for them.

    >>> import qtk, torch
    >>> class Sum(torch.nn.Module):
    ...     def forward(self, x, total):
    ...         return x.relu(), total + x
    >>> batches = [(torch.ones(2, 1), torch.zeros(2, 1)) for _ in range(6)]
    >>> sim = qtk.QuantSim(Sum(), batches[0], states={"total": 1})
    >>> sim.compute_encodings(qtk.Sequences(batches, reset=3), progress=False)
    >>> round(float(sim.encodings()["total:input"].maximum), 3)
    3.0

    A function of the batch says it too:

    >>> first = qtk.Sequences(batches, reset=lambda batch: batch is batches[0])
    >>> sim.compute_encodings(first, progress=False)
    >>> round(float(sim.encodings()["total:input"].maximum), 3)
    6.0

    Args:
        data: the batches, a list or a loader.
        reset: the number of batches of a sequence, or a function from a batch to whether it is the first of one.

    Raises: CalibrationError for data that are no batches or can be read once alone, or a number below 1.
    """

    def __init__(self, data: Iterable[object], *, reset: Reset) -> None:
        if not isinstance(data, Iterable) or isinstance(data, Iterator):
            raise CalibrationError("sequences are made of batches that can be read again, a list or a loader; got "
                                   f"{type(data).__name__}")
        if not callable(reset) and reset < 1:
            raise CalibrationError(f"reset must be at least 1, the number of batches of a sequence; got {reset}")
        self.data, self.reset = data, reset

    def __iter__(self) -> Iterator[object]:
        return iter(self.data)

    def __len__(self) -> int:
        """Raises: TypeError if the data have no length."""
        if not isinstance(self.data, Sized):
            raise TypeError(f"{type(self.data).__name__} has no length")
        return len(self.data)


def like(data: object, batches: list[object]) -> list[object] | Sequences:
    """``batches``, with sequences that begin as in ``data``, if ``data`` say where."""
    return Sequences(batches, reset=data.reset) if isinstance(data, Sequences) else batches


def begins(batches: Sequences) -> list[int]:
    """The numbers of the batches at which a sequence begins.

    >>> begins(Sequences([1, 2, 3, 4, 5], reset=2))
    [0, 2, 4]
    """
    reset = batches.reset
    return [at for at, each in enumerate(batches) if (reset(each) if callable(reset) else at % reset == 0)]


def apart(batches: list[object] | Sequences, share: float) -> tuple[list[object] | Sequences, list[object] | Sequences]:
    """Cuts batches in two, the second with about ``share`` of them, at least one, both of whole sequences.

    >>> apart([1, 2, 3, 4, 5], 0.2)
    ([1, 2, 3, 4], [5])

    Raises: CalibrationError if they are one sequence.
    """
    items = list(batches)
    starts = begins(batches) if isinstance(batches, Sequences) else range(len(items))
    wanted = len(items) - max(1, round(share * len(items)))
    cut = min((at for at in starts if at), key=lambda at: abs(at - wanted), default=None)
    if cut is None:
        raise CalibrationError(f"the {len(items)} batches are one sequence, and the last sequence judges what the "
                               "others calibrate: pass more, or a reset at which another begins")
    return like(batches, items[:cut]), like(batches, items[cut:])
