"""Calibration in several processes: each observes its share of the data, then all know what all have seen."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, distributed
from torch.utils import _pytree as pytree

from qtk.errors import CalibrationError
from qtk.observers.observer import Observer


def joined(observers: Mapping[str, Observer], problem: CalibrationError | None = None) -> Mapping[str, Observer]:
    """What the observers of all ranks have seen, joined in the order of the ranks; what is given, if there is one rank.

    Every rank of the default process group must call it; one exchange in all.

    Args:
        observers: those of this rank, by site.
        problem: what went wrong here, to be raised everywhere.

    Raises: CalibrationError naming the rank with a problem.
    """
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        if problem is not None:
            raise problem
        return observers
    own = {name: _moved(observer, torch.device("cpu")) for name, observer in observers.items()}
    shares: list[tuple[str | None, dict[str, Observer]]] = [(None, {})] * distributed.get_world_size()
    distributed.all_gather_object(shares, (None if problem is None else str(problem), own))
    problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(shares) if text is not None]
    if problems:
        raise CalibrationError("; ".join(problems))
    merged = shares[0][1]
    for rank, (_, share) in enumerate(shares[1:], start=1):
        if share.keys() != merged.keys():
            raise CalibrationError(f"rank 0 and rank {rank} calibrate different sites; quantize the same model alike")
        for name, observer in merged.items():
            observer.merge(share[name])
    return {name: _moved(observer, _device_of(observers[name])) for name, observer in merged.items()}


def _moved(observer: Observer, device: torch.device) -> Observer:
    """A copy whose tensors are on a device."""
    moved = copy.copy(observer)
    moved.__dict__.update(pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), vars(observer)))
    return moved


def _device_of(observer: Observer) -> torch.device:
    tensors = (leaf for leaf in pytree.tree_leaves(vars(observer)) if isinstance(leaf, Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
