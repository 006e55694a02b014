"""Modules that act in train mode only: recognised by what they do, and shown to tracers as one op.

A module is train-only if it returns its input in eval mode, itself and unchanged, without calling another module, and
something else in train mode: dropout, stochastic depth, a user's own noise. Capture in eval mode would see nothing of
it; instead its call becomes one node, and it stays in the prepared model as it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qtk.capture.restored import restored
from qtk.capture.train_mode.markers import MODULE, WRITING_MODULE
from qtk.errors import OUT_OF_MEMORY
from qtk.nn.seed import set_seed
from qtk.torch_private import DropoutBase, version_of

TRIES = 8
"""How often a module is run in train mode before it is taken to do nothing there either."""

TrainOnly = Mapping[nn.Module, bool]
"""Module → whether it writes into its input in train mode."""


@contextmanager
def finding_train_only(model: nn.Module) -> Iterator[dict[nn.Module, bool]]:
    """Finds the train-only modules of ``model``, which runs in eval mode in the body. Yields: what is found by its end.

    Every call of such a module must have one argument, a tensor. A module that does nothing in train mode either, as
    with a probability of 0, is found if it is a dropout of torch's, or another of its class is found.
    """
    found: dict[nn.Module, bool] = {}
    refused: set[nn.Module] = set()
    idle: set[nn.Module] = set()
    running: list[list[Any]] = []  # module, version of its input, whether it has called another
    probing = False

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if probing:
            return
        if running:
            running[-1][2] = True
        x = args[0] if len(args) == 1 and not kwargs else None
        is_counted = isinstance(x, Tensor) and not x.is_inference()
        running.append([module, version_of(x) if is_counted else None, False])  # type: ignore[arg-type]

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        nonlocal probing
        if probing:
            return
        while running[-1][0] is not module:  # raised, and the model caught it
            running.pop()
        _, version, calls = running.pop()
        handed_on = isinstance(output, Tensor) and version is not None and output is args[0]
        if not handed_on or calls or module.training or version_of(args[0]) != version:
            refused.add(module)
        elif module not in found and module not in refused and module not in idle:
            probing = True
            try:
                writes = _differs_in_train(module, args[0])
            finally:
                probing = False
            if writes is not None:
                found[module] = writes
            else:
                idle.add(module)

    modules = [m for m in model.modules() if m is not model and not isinstance(m, torch.jit.ScriptModule)]
    handles = [module.register_forward_pre_hook(before, prepend=True, with_kwargs=True) for module in modules]
    handles += [module.register_forward_hook(after, with_kwargs=True) for module in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    acting = {type(module) for module in found}
    found.update({
        module: bool(getattr(module, "inplace", False)) for module in idle
        if isinstance(module, DropoutBase) or type(module) in acting
    })
    for module in refused & found.keys():
        del found[module]


def _differs_in_train(module: nn.Module, x: Tensor) -> bool | None:
    """Says whether ``module`` writes into its input in train mode; ``None`` if it returns it or changes the shape."""
    is_of_torch = type(module).__module__ == DropoutBase.__module__
    if type(module) is nn.Identity or (is_of_torch and getattr(module, "p", None) == 0):
        return None
    try:
        with restored(module), _other_random_states(), torch.no_grad():
            module.train()
            for seed in range(TRIES):
                set_seed(seed)
                given = x.detach().clone()
                output = module.forward(given)
                if not isinstance(output, Tensor) or output.shape != x.shape or output.dtype != x.dtype:
                    return None
                writes = version_of(given) > 0
                if output is not given or writes:
                    return writes
    except OUT_OF_MEMORY:
        raise
    except Exception:  # of the user's code, which may run in other circumstances only
        return None
    return None


@contextmanager
def _other_random_states() -> Iterator[None]:
    """Restores the random states of Python and NumPy, which a user's module may draw from."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextmanager
def as_ops(model: nn.Module, train_only: TrainOnly) -> Iterator[None]:
    """While the body runs, the train-only modules below ``model`` call a marker op with their path."""
    inside = [(path, module) for path, module in model.named_modules() if path and module in train_only]
    forwards = {module: vars(module).get("forward") for _, module in inside}
    try:
        for path, module in inside:
            op = WRITING_MODULE if train_only[module] else MODULE
            vars(module)["forward"] = lambda x, op=op, path=path: op(x, path)
        yield
    finally:
        for module, forward in forwards.items():
            if forward is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward
