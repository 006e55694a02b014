"""Taps: modules on a value that observe or change it."""

from __future__ import annotations

from torch import nn


class Tap(nn.Module):
    """A module that returns its input as it is while idle, and else observes or changes it."""

    @property
    def idle(self) -> bool:
        """Whether values are neither observed nor changed, so that a fused kernel may skip this module."""
        raise NotImplementedError


def all_idle(module: nn.Module) -> bool:
    """Whether no tap in ``module`` is active; true without any."""
    return all(inner.idle for inner in module.modules() if isinstance(inner, Tap))
