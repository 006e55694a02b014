"""The base class of modules, such as quantizers, that observe or change one value of a model."""

from __future__ import annotations

from torch import nn


class Tap(nn.Module):
    """A module on one value: the identity while ``idle``, else it observes or changes the value."""

    @property
    def idle(self) -> bool:
        """Whether values are neither observed nor changed, so that a fused kernel may skip this module."""
        raise NotImplementedError


def all_idle(module: nn.Module) -> bool:
    """Whether every tap in ``module`` is idle, or there are none."""
    return all(inner.idle for inner in module.modules() if isinstance(inner, Tap))
