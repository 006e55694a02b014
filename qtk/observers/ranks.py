"""Calibration in several processes: each rank observes its share of the data, then all statistics are merged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, distributed

from qtk.core.site import Site
from qtk.errors import CalibrationError
from qtk.observers.observer import Observer
from qtk.torch_private import pytree

T = TypeVar("T")


def joined(
    observers: Mapping[Site, Observer], device: torch.device, problem: Exception | None = None
) -> Mapping[Site, Observer]:
    """Merges the observers of all ranks, in the order of the ranks; returns ``observers`` if there is one rank.

    Every rank of the default process group must call it; it exchanges data once.

    Args:
        observers: site → observer of this rank.
        device: of the result.
        problem: an error of this rank, to be raised on every rank.

    Raises: ``problem``; on other ranks CalibrationError naming the rank that has it.
    """
    if not several_ranks():
        if problem is not None:
            raise problem
        return observers
    on_cpu = {site: _moved(observer, torch.device("cpu")) for site, observer in observers.items()}
    merged, *others = exchanged(on_cpu, problem)
    for rank, other in enumerate(others, start=1):
        if other.keys() != merged.keys():
            raise CalibrationError(f"rank 0 and rank {rank} calibrate different sites; quantize the same model with "
                                   "the same settings on both")
        for site, observer in merged.items():
            observer.merge(other[site])
    return {site: _moved(observer, device) for site, observer in merged.items()}


def agree(problem: Exception | None) -> None:
    """Raises the error of any rank on all ranks. Every rank must call it. Raises: as ``joined``."""
    if several_ranks():
        exchanged(None, problem)
    elif problem is not None:
        raise problem


def from_first(make: Callable[[], T]) -> T:
    """Runs ``make`` on the first rank and returns its result on all.

    Raises: what ``make`` raises; on other ranks CalibrationError with its message.
    """
    if not several_ranks():
        return make()
    problem: Exception | None = None
    outcome: list[tuple[str | None, T | None]] = [(None, None)]  # message of an error, or the result
    if distributed.get_rank() == 0:
        try:
            outcome = [(None, make())]
        except Exception as error:  # the other ranks are waiting
            problem, outcome = error, [(f"rank 0: {type(error).__name__}: {error}", None)]
    distributed.broadcast_object_list(outcome, src=0)
    if problem is not None:
        raise problem
    (text, result), = outcome
    if text is not None:
        raise CalibrationError(text)
    return result  # type: ignore[return-value]


def several_ranks() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def exchanged(value: T, problem: Exception | None) -> list[T]:
    """The value of every rank, in order. Raises: ``problem``; CalibrationError for the errors of other ranks."""
    shares: list[tuple[str | None, T]] = [(None, value)] * distributed.get_world_size()
    said = None if problem is None else f"{type(problem).__name__}: {problem}"
    distributed.all_gather_object(shares, (said, value))
    problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(shares) if text is not None]
    if problem is not None:
        raise problem
    if problems:
        raise CalibrationError("; ".join(problems))
    return [share for _, share in shares]


def _moved(observer: Observer, device: torch.device) -> Observer:
    """A copy of ``observer`` with its tensors on ``device``."""
    moved = copy.copy(observer)
    moved.__dict__.update(pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), vars(observer)))
    return moved
