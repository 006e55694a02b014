"""The base class of modules, such as quantizers, that observe or change one value of a model."""

from __future__ import annotations

from torch import nn

from qtk.torch_private import hooks


class Tap(nn.Module):
    """A module on one value: the identity while ``idle``, else it observes or changes the value."""

    @property
    def idle(self) -> bool:
        """Says whether values are neither observed nor changed, so that a fused kernel may skip this module."""
        raise NotImplementedError

    @property
    def repeatable(self) -> bool:
        """Says whether a second call with the same value returns the same and leaves no trace."""
        return False


def all_idle(module: nn.Module) -> bool:
    """Says whether every tap in ``module`` is idle, or there are none."""
    return all(inner.idle for inner in module.modules() if isinstance(inner, Tap))


def all_repeatable(module: nn.Module) -> bool:
    """Says whether every tap in ``module`` is repeatable, and no module in it has hooks."""
    return not any(
        hooks(inner) or (isinstance(inner, Tap) and not inner.repeatable) for inner in module.modules()
    )
