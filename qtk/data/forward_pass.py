"""Runs a model over a user's data, batch by batch."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from qtk.calls.calls import leaves_text
from qtk.calls.inputs import split_inputs
from qtk.capture.tracing import TRACING
from qtk.data.batch_advice import batch_advice
from qtk.data.labels import without_labels
from qtk.data.rolled_states import RolledStates, written_places
from qtk.data.sequences import Sequences, like
from qtk.errors import CalibrationError, CaptureError, QtkError
from qtk.graph.failed_op import failed_op
from qtk.graph.graphs import contents_of, roots, states_of
from qtk.nn.eval_mode import evaluating
from qtk.nn.kept_buffers import buffers_kept
from qtk.operators.contents import Trait
from qtk.public import PASS_THROUGH, raised_by_us, runs_model
from qtk.quantizers.modes import caching

Batch: TypeAlias = object
"""What a loader yields: a tensor, a tuple of positional arguments, or a mapping of keyword arguments, labels among
them (``without_labels``)."""

Forward: TypeAlias = Callable[[nn.Module, Batch], object]
"""A function that runs a model on a batch, in place of ``run_batch``."""

Data: TypeAlias = Iterable[Batch] | Callable[[nn.Module], object]
"""Batches, or a function that runs the model over its own data."""

MOST_UNCOUNTED = 2_048
"""Batches that a calibration takes of a source without a length: more are a source without an end, for calibration
needs hundreds of samples, and a source that goes on for good reason can be cut by ``num_batches``."""


@runs_model
def run_batch(model: nn.Module, batch: Batch) -> object:
    """``model(batch)`` for a tensor, ``model(*batch)`` for a tuple or list, ``model(**batch)`` for a mapping.

    What the model cannot take, as labels, is left out (``without_labels``).

    Raises: CalibrationError for any other type.
    """
    try:
        args, kwargs = split_inputs(without_labels(model, batch))
    except CaptureError:
        raise CalibrationError(
            f"a batch must be a tensor, a tuple or a dict, got {type(batch).__name__}; "
            "pass forward=lambda model, batch: …"
        ) from None
    return model(*args, **kwargs)


def outputs(
    model: nn.Module,
    data: Iterable[Batch],
    *,
    forward: Forward | None = None,
    num_batches: int | None = None,
    most_uncounted: int | None = None,
    label: str = "",
    progress: bool = False,
    ended_by: tuple[type[BaseException], ...] = (),
) -> Iterator[object]:
    """The model's output for each batch, one at a time, without gradients, in eval mode while it runs.

    States of the model are handed from batch to batch (``RolledStates``). Buffers that forward writes are as before
    when the data end.
    ``ended_by``: exceptions that end a batch normally, with the output ``None``. ``most_uncounted``: batches after
    which ``data`` without a length, and without ``num_batches``, are refused.

    Raises: CalibrationError if there is no batch, or naming the batch that cannot be read, or that the model does not
        run on.
    """
    _check(data, num_batches)
    num_batches = None if num_batches is None else min(num_batches, sys.maxsize)
    run = forward or run_batch
    total = min((number for number in (length_of(data), num_batches) if number is not None), default=None)
    batches = read(data, num_batches)
    seen = 0
    rolled = RolledStates(model, data) if _may_have_states(model, data) else None
    with caching(model), nullcontext() if rolled is None else rolled.listening():
        for index, batch in enumerate(tqdm(batches, desc=label, total=total, unit="batch", disable=not progress)):
            if total is None and index == most_uncounted:
                raise CalibrationError(
                    f"{label or 'the data'}: the {type(data).__name__} has no length and gave more than {index} "
                    "batches, so it may never end; pass num_batches (a few hundred samples are enough), or data with "
                    "a length"
                )
            if rolled is not None:
                rolled.begin(batch)
            with TRACING, evaluating(model), torch.no_grad():
                try:
                    output = _called(run, model, batch)
                except ended_by:
                    output = None
                except QtkError as error:
                    raise type(error)(f"batch {index}: {error}") from None
                except PASS_THROUGH:
                    raise
                except Exception as error:  # whatever a model or a user's forward raises
                    if raised_by_us(error):
                        raise
                    raise CalibrationError(_refused(model, index, batch, error, forward)) from error
            seen += 1
            yield output
    if seen == 0:
        raise CalibrationError(
            f"{label or 'the data'}: no batches; pass a non-empty iterable (num_batches={num_batches})"
        )


def run_all(
    model: nn.Module,
    data: Data,
    *,
    forward: Forward | None = None,
    num_batches: int | None = None,
    most_uncounted: int | None = MOST_UNCOUNTED,
    label: str = "",
    progress: bool = False,
    ended_by: tuple[type[BaseException], ...] = (),
) -> None:
    """Runs the model over all of ``data`` and drops what it returns; arguments as for ``outputs``.

    A function as data passes states on itself.

    Raises: CalibrationError as ``outputs``.
    """
    if callable(data) and not isinstance(data, Iterable):
        with TRACING, caching(model), evaluating(model), torch.no_grad(), buffers_kept(written_places(model)):
            try:
                _called(data, model)
            except PASS_THROUGH:
                raise
            except Exception as error:
                if raised_by_us(error):
                    raise
                op = failed_op(error)
                at = f", at {op}" if op else ""
                raise CalibrationError(f"data(model) raised {type(error).__name__}{at}: {error}") from error
        return
    batches = outputs(
        model, data, forward=forward, num_batches=num_batches, most_uncounted=most_uncounted, label=label,
        progress=progress, ended_by=ended_by,
    )
    for _ in batches:
        pass


def length_of(data: object) -> int | None:
    """``len(data)``; ``None`` if it has none, as a ``DataLoader`` over an ``IterableDataset``, which is ``Sized``.

    A ``TypeError`` of a ``__len__``, by which wrappers of data without a length have none, may be a mistake: a warning.

    >>> length_of([1, 2]), length_of(iter([1, 2]))
    (2, None)
    """
    try:
        return len(data)  # type: ignore[arg-type]
    except NotImplementedError:
        return None
    except TypeError as error:
        counted = data.dataset if isinstance(data, DataLoader) else data
        if hasattr(type(counted), "__len__"):
            warnings.warn(f"the {type(data).__name__} is taken to have no length, for its __len__ raised TypeError: "
                          f"{error}", stacklevel=2)
        return None


def _unreadable(index: int, error: BaseException) -> QtkError:
    return CalibrationError(f"batch {index} of the data cannot be read: {type(error).__name__}: {error}")


def read(
    data: Iterable[Batch],
    num_batches: int | None = None,
    *,
    unreadable: Callable[[int, BaseException], QtkError] = _unreadable,
) -> Iterator[Batch]:
    """The batches of ``data``, or the first ``num_batches``.

    >>> list(read([1, 2, 3], 2))
    [1, 2]

    Args:
        data: the batches.
        num_batches: how many of them; no more are read.
        unreadable: from the index of a batch and what the loader raised to the error.

    Raises: ``unreadable(index, error)``, a CalibrationError that names the batch, if the loader fails or cannot start.
    """
    index = 0
    try:
        for batch in itertools.islice(data, num_batches):
            yield batch
            index += 1
    except PASS_THROUGH:
        raise
    except (Exception, SystemExit) as error:  # whatever a loader does; sys.exit would end the run without a word
        raise unreadable(index, error) from error


def in_memory(
    data: Iterable[Batch], num_batches: int | None, *, least: int = 1, why: str = ""
) -> list[Batch] | Sequences:
    """The batches of ``data`` as a list, for what reads them several times, or as sequences of such.

    Args:
        data: batches.
        num_batches: how many; ``None``: all.
        least: how many there must be.
        why: so many.

    Raises: CalibrationError for data that are no batches, fewer than ``least``, or more than ``MOST_UNCOUNTED`` without
        ``num_batches``.
    """
    _check(data, num_batches)
    batches = list(read(data, MOST_UNCOUNTED + 1 if num_batches is None else num_batches))
    if num_batches is None and len(batches) > MOST_UNCOUNTED:
        raise CalibrationError(f"the data have more than {MOST_UNCOUNTED} batches, which would all be kept in memory; "
                               "pass num_batches (a few hundred samples are enough)")
    if len(batches) < least:
        raise CalibrationError(f"at least {least} batches are needed, got {len(batches)}" + (f": {why}" if why else ""))
    return like(data, batches)


def _may_have_states(model: nn.Module, data: object) -> bool:
    """Says whether a model keeps anything from call to call, or the data say so: of a model in Python nobody knows."""
    is_said = isinstance(data, Sequences) or states_of(model) != {}
    return is_said or "" not in roots(model) or Trait.WRITES in contents_of(model)


def _check(data: object, num_batches: int | None) -> None:
    """Raises: CalibrationError for data that are no batches, or a number of them below 1."""
    if num_batches is not None and num_batches < 1:
        raise CalibrationError(f"num_batches must be at least 1, or None for all; got {num_batches}")
    if not isinstance(data, Iterable):
        raise CalibrationError(
            f"data must be an iterable of batches, e.g. a DataLoader or a list of tensors, got {type(data).__name__}"
        )


@runs_model
def _called(run: Callable[..., object], *arguments: object) -> object:
    return run(*arguments)


def _refused(model: nn.Module, index: int, batch: Batch, error: Exception, forward: Forward | None) -> str:
    """The message of the error when the model does not run on a batch."""
    shown = leaves_text(dict(batch) if isinstance(batch, Mapping) else batch)
    stars = "" if isinstance(batch, Tensor) else "**" if isinstance(batch, Mapping) else "*"
    passed = f"model({stars}batch)"
    how = "your forward(model, batch)" if forward else passed
    advice = "" if forward else batch_advice(model, without_labels(model, batch))
    op = failed_op(error)
    return (
        f"batch {index} ({type(batch).__name__} of {shown}) does not run as {how}{f', at {op}' if op else ''}: "
        f"{type(error).__name__}: {error}{f'; {advice}' if advice else ''}"
    )
