"""Modules that watch what passes through them."""

from __future__ import annotations

from torch import nn


class Tap(nn.Module):
    """A module that looks at, or changes, the value passed through it, unless it is idle."""

    @property
    def idle(self) -> bool:
        """Whether values pass by unseen and unchanged, so that a kernel may skip this module."""
        raise NotImplementedError


def all_idle(module: nn.Module) -> bool:
    """Whether no tap in ``module`` is active; true without any."""
    return all(inner.idle for inner in module.modules() if isinstance(inner, Tap))
