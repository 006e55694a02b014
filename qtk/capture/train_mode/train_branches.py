"""Names the modules whose own code does other things in train mode than in eval mode: ``if self.training``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qtk.calls.calls import detached, leaves_text
from qtk.capture.restored import restored
from qtk.capture.train_mode.without_dropout import WithoutDropout
from qtk.errors import OUT_OF_MEMORY, VerificationError
from qtk.graph.sites import prefixes
from qtk.nn.seed import set_seed
from qtk.torch_private import BatchNormBase, pytree

LISTED = 4
"""Modules, and differences of each, that a text names."""

BY_MODE = ("dropout", "batch_norm", "instance_norm", "scaled_dot_product_attention")
"""Functions that are told the mode, or a probability by the mode."""


def failure(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    train_only: Collection[nn.Module],
    error: VerificationError,
) -> str:
    """Returns what makes train mode differ from the prepared model, by module path; the numbers where no module does.

    Runs ``model`` in both modes with the same seed, and restores its state.
    """
    numbers = str(error).partition("\n")[0]
    try:
        branches = _branches(model, args, kwargs, train_only)
    except OUT_OF_MEMORY:
        raise
    except Exception:  # of the user's code
        branches = []
    if not branches:
        return f"{type(model).__name__}: {numbers}"
    more = [f"and {len(branches) - LISTED} more modules"] if len(branches) > LISTED else []
    return "; ".join([*branches[:LISTED], *more])


def _branches(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], train_only: Collection[nn.Module]
) -> list[str]:
    with restored(model):
        in_eval = _events(model.eval(), args, kwargs)
    with restored(model), WithoutDropout(model.train(), train_only):
        in_train = _events(model, args, kwargs)
    branches: dict[str, str] = {}
    for path, module in sorted(model.named_modules(), key=lambda named: -len(prefixes(named[0]))):
        before, after = in_eval.get(path), in_train.get(path)
        if any(path in prefixes(inner) for inner in branches):  # which may return something else because of that
            before, after = _without_returns(before), _without_returns(after)
        difference = None if isinstance(module, BatchNormBase) else _difference(before, after)
        if difference is not None:
            branches[path] = f"{path or 'the model'} ({type(module).__name__}) {difference}"
    return list(branches.values())


def _without_returns(events: list[str] | None) -> list[str] | None:
    return None if events is None else [event for event in events if not event.startswith("returns ")]


class _Events(TorchFunctionMode):
    """Records what the code of each module does, by path: functions, calls of modules, and what it returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.paths = {module: path for path, module in model.named_modules()}
        self.by_path: dict[str, list[str]] = defaultdict(list)
        self.running = [""]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if not name.startswith("__get") and "dropout" not in name:
            constants = [
                leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, (bool, int, float, str))
            ]
            given = "" if any(word in name for word in BY_MODE) else f"({', '.join(map(repr, constants))})"
            self.by_path[self.running[-1]].append(f"calls torch's {name}{given}")
        return func(*args, **(kwargs or {}))

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.by_path[self.running[-1]].append(f"calls {self.paths[module]} ({type(module).__name__})")
        self.running.append(self.paths[module])
        self.by_path[self.paths[module]].append("runs")

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        self.running.pop()
        kind = "" if isinstance(output, Tensor) else f"{type(output).__name__} of "
        self.by_path[self.paths[module]].append(f"returns {kind}{leaves_text(output)}")


def _events(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, list[str]]:
    events = _Events(model)
    modules = [module for module in events.paths if not isinstance(module, torch.jit.ScriptModule)]
    handles = [module.register_forward_pre_hook(events.enter, prepend=True) for module in modules]
    handles += [module.register_forward_hook(events.leave, always_call=True) for module in modules]
    try:
        with torch.no_grad(), events:
            set_seed(0)
            model(*detached(args), **detached(kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return dict(events.by_path)


def _difference(in_eval: list[str] | None, in_train: list[str] | None) -> str | None:
    """Returns what a module does in one mode only; ``None`` if it does the same, or runs in one mode only."""
    if in_eval is None or in_train is None or in_eval == in_train:
        return None
    texts = []
    for mode, here, there in (("train", in_train, in_eval), ("eval", in_eval, in_train)):
        only = list(dict.fromkeys(event for event in here if event not in there))
        if only:
            more = [f"{len(only) - LISTED} more"] if len(only) > LISTED else []
            texts.append(f"in {mode} mode alone {', '.join([*only[:LISTED], *more])}")
    return ", ".join(texts) or "does the same things in both modes, but not as often"
