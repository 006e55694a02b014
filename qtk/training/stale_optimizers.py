"""Finds optimizers that were made before the parameters of learned ranges, and so would never train them."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from qtk.errors import EncodingError
from qtk.quantizers.quantizer import Quantizer


def watch_optimizers(model: nn.Module, learning: Mapping[str, Quantizer]) -> None:
    """Lets every optimizer of ``model`` check, before its next step, that some optimizer has the new parameters.

    An optimizer keeps the list of parameters it was made with. In its next step, because until then a group may be
    added to it, or another optimizer be made.

    Args:
        model: optimizers that hold one of its parameters are watched.
        learning: name of a site → its quantizer, whose range is learned.
    """
    of_model = {id(parameter) for parameter in model.parameters()}
    for optimizer in _optimizers():
        count = len(of_model & _held(optimizer))
        if count and not _has_ranges([optimizer], learning):
            _watch(optimizer, learning, count)


def _watch(optimizer: torch.optim.Optimizer, learning: Mapping[str, Quantizer], count: int) -> None:
    def before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        learned = {name: quantizer for name, quantizer in learning.items() if quantizer.learns_range}
        if learned and not _has_ranges(_optimizers(), learned):
            raise EncodingError(
                f"this {type(optimizer).__name__} holds {count} parameters of sim.model, but was made before "
                f"sim.learn_ranges(), which added the parameters of {len(learned)} ranges, the first of them "
                f"{next(iter(learned))}; make it after learn_ranges, or add them: optimizer.add_param_group("
                "{'params': sim.range_parameters(), 'weight_decay': 0.0})"
            )
        handle.remove()

    handle = optimizer.register_step_pre_hook(before_step)


def _has_ranges(optimizers: Collection[torch.optim.Optimizer] | Iterator[torch.optim.Optimizer],
                learning: Mapping[str, Quantizer]) -> bool:
    ranges = {id(parameter) for quantizer in learning.values() for parameter in quantizer.parameters(recurse=False)}
    return any(ranges & _held(optimizer) for optimizer in optimizers)


def _optimizers() -> Iterator[torch.optim.Optimizer]:
    """Every optimizer there is; torch keeps no list of them. Wrappers that only pass one on are left out."""
    for each in gc.get_objects():
        if issubclass(type(each), torch.optim.Optimizer) and "param_groups" in vars(each):
            yield each


def _held(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
