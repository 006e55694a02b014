"""Eval mode: a context that restores the training flags, torch's fast path off, and batch norms that stay in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, each module's own training flag restored afterwards.

    Sets the flags directly: ``train()`` and ``eval()`` would also drop cached quantized weights.
    """
    training = [module for module in model.modules() if module.training]
    _set_training(training, False)
    try:
        yield
    finally:
        _set_training(training, True)


def _set_training(modules: Sequence[nn.Module], training: bool) -> None:
    """Sets the flags, of most modules without their ``__setattr__``, which takes longer than a small batch."""
    for module in modules:
        if "training" in vars(module):
            vars(module)["training"] = training
        else:  # a ScriptModule
            module.training = training


@contextmanager
def not_trained(model: nn.Module) -> Iterator[None]:
    """Inside, no parameter of ``model`` asks for a gradient, so that backward passes are of its values alone."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


_LOCK = threading.Lock()
_users = 0
_enabled_before = True


@contextmanager
def fast_path_off() -> Iterator[None]:
    """Runs ``nn.TransformerEncoder``, its layers and ``nn.MultiheadAttention`` without their fused eval-mode kernels.

    The fast path reads parameters without calling the submodules, and converts padded inputs to nested tensors, so that
    padded positions become zeros; other outputs are the same. torch's setting is one for the process: of uses that
    overlap in several threads, the first switches the path off and the last restores it.
    """
    global _users, _enabled_before
    with _LOCK:
        if _users == 0:
            _enabled_before = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _users += 1
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            if _users == 0:
                torch.backends.mha.set_fastpath_enabled(_enabled_before)


FROZEN = "_qtk_frozen"
"""Attribute of a batch norm that stays in eval mode when its model is set to train mode."""


def keep_frozen(model: nn.Module) -> None:
    """Puts the batch norms of ``model`` that are to stay in eval mode back into it. In place."""
    for module in model.modules():
        if vars(module).get(FROZEN):
            module.eval()
