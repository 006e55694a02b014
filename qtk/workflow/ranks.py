"""Calibration in several processes: each observes its share of the data, then all know what all have seen."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, distributed
from torch.utils import _pytree as pytree

from qtk.errors import CalibrationError
from qtk.observers.observer import Observer


def joined(
    observers: Mapping[str, Observer], device: torch.device, problem: Exception | None = None
) -> Mapping[str, Observer]:
    """What the observers of all ranks have seen, joined in the order of the ranks; what is given, if there is one rank.

    Every rank of the default process group must call it; one exchange in all.

    Args:
        observers: those of this rank, by site.
        device: where the result shall be.
        problem: what went wrong here, to be raised everywhere.

    Raises: the problem; on other ranks CalibrationError naming the rank that has it.
    """
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        if problem is not None:
            raise problem
        return observers
    own = {name: _moved(observer, torch.device("cpu")) for name, observer in observers.items()}
    shares: list[tuple[str | None, dict[str, Observer]]] = [(None, {})] * distributed.get_world_size()
    said = None if problem is None else f"{type(problem).__name__}: {problem}"
    distributed.all_gather_object(shares, (said, own))
    problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(shares) if text is not None]
    if problem is not None:
        raise problem
    if problems:
        raise CalibrationError("; ".join(problems))
    merged = shares[0][1]
    for rank, (_, share) in enumerate(shares[1:], start=1):
        if share.keys() != merged.keys():
            raise CalibrationError(f"rank 0 and rank {rank} calibrate different sites; quantize the same model alike")
        for name, observer in merged.items():
            observer.merge(share[name])
    return {name: _moved(observer, device) for name, observer in merged.items()}


def _moved(observer: Observer, device: torch.device) -> Observer:
    """A copy whose tensors are on a device."""
    moved = copy.copy(observer)
    moved.__dict__.update(pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), vars(observer)))
    return moved
