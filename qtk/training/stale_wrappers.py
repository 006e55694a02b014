"""Finds ``DistributedDataParallel`` wrappers that were made before the parameters of learned ranges."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qtk.errors import EncodingError
from qtk.quantizers.quantizer import Quantizer


def watch_wrappers(model: nn.Module, made: Mapping[str, Quantizer]) -> None:
    """Lets every wrapper of ``model`` refuse its next forward pass: it would not average the new gradients.

    It lists the parameters when it is made. In its next forward pass, because one that is no longer used does no harm.

    Args:
        model: whose wrappers are watched.
        made: name of a site → its quantizer, whose parameters are new.
    """
    for wrapper in _wrappers() if made else ():
        if any(module is model for module in wrapper.module.modules()):
            _watch(wrapper, made)


def _watch(wrapper: DistributedDataParallel, made: Mapping[str, Quantizer]) -> None:
    def before_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
        learned = [name for name, quantizer in made.items() if quantizer.learns_range]
        if learned:
            raise EncodingError(
                "this DistributedDataParallel was made before sim.learn_ranges(), which added the parameters of "
                f"{len(learned)} ranges, the first of them {learned[0]}: it would not average their gradients, and "
                "each process would train ranges of its own; call learn_ranges first, then wrap sim.model"
            )
        handle.remove()

    handle = wrapper.register_forward_pre_hook(before_forward)


def _wrappers() -> Iterator[DistributedDataParallel]:
    """Every wrapper there is; torch keeps no list of them."""
    for each in gc.get_objects():
        if issubclass(type(each), DistributedDataParallel) and "module" in vars(each).get("_modules", ()):
            yield each
