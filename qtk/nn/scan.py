"""A function of the original's code that a prepared model calls whole, in float: a recurrence over time."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from qtk.errors import CaptureError
from qtk.torch_private import pytree


class Scan(nn.Module):
    """Calls a function as the original's code did when it was captured, with other tensors.

    >>> import torch
    >>> structure = pytree.tree_structure(((torch.ones(2), 3.0), {}))
    >>> Scan(torch.add, structure, [None, 3.0], values=[0])(torch.zeros(1))
    (tensor([3.]),)

    Args:
        function: a function of some module of Python; a decorator may have replaced it there.
        structure: the structure of its arguments ``(args, kwargs)``.
        leaves: the leaves of these: numbers and text; what stands at ``values`` is not read.
        values: the positions in ``leaves`` of tensors, and then of lengths, in the order in which they are passed.
        written: the positions of tensors that the function writes into; it gets copies, which are results.
    """

    def __init__(
        self, function: Callable[..., object], structure: pytree.TreeSpec, leaves: Sequence[object],
        values: Sequence[int], written: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.function, self._structure = function, structure
        self._leaves = [None if index in values else copy.deepcopy(leaf) for index, leaf in enumerate(leaves)]
        self._values, self._written = tuple(values), tuple(written)

    @property
    def modules_passed(self) -> list[nn.Module]:
        """The modules among the arguments."""
        return [leaf for leaf in self._leaves if isinstance(leaf, nn.Module)]

    def train(self, mode: bool = True) -> Scan:
        """As torch's, and for the modules among the arguments: a method of the original's code asks its module."""
        for module in self.modules_passed:
            module.train(mode)
        return super().train(mode)

    def forward(self, *values: Tensor | int) -> tuple[Tensor, ...]:
        """The tensors that the function returns, in order, then what it wrote. Args: values: tensors, then lengths."""
        leaves: list[object] = list(self._leaves)
        for index, value in zip(self._values, values, strict=True):
            leaves[index] = value.clone() if index in self._written and isinstance(value, Tensor) else value
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        result = pytree.tree_leaves(self.function(*args, **kwargs))
        results = [*result, *(leaves[index] for index in self._written)]
        return tuple(leaf for leaf in results if isinstance(leaf, Tensor))

    def extra_repr(self) -> str:
        """The function, and its arguments that are no tensors."""
        named = f"{self.function.__module__}.{self.function.__qualname__}"
        others = [type(leaf).__name__ if isinstance(leaf, nn.Module) else repr(leaf)
                  for index, leaf in enumerate(self._leaves) if index not in self._values]
        return ", ".join([named, *others])

    def __deepcopy__(self, memo: dict[int, object]) -> Scan:
        """With the same function, which a copy need not find by its name: it may have none outside of a function."""
        copied = Scan.__new__(Scan)
        memo[id(self)] = copied
        copied.__dict__ = {**copy.deepcopy({**self.__dict__, "function": None}, memo), "function": self.function}
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """The name of the function in its place, for what a decorator has replaced cannot be pickled.

        Raises: CaptureError for a function without a name outside of another.
        """
        if "<locals>" in self.function.__qualname__:
            raise CaptureError(f"a prepared model cannot be pickled if {self.function.__qualname__}, a scan over time, "
                               "is a function inside another; define it, or its class, in a module, or write the "
                               "model's state_dict, or the simulation by sim.save(directory)")
        return {**self.__dict__, "function": (self.function.__module__, self.function.__qualname__)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        module, name = state["function"]
        self.__dict__.update(state, function=inspect.unwrap(attrgetter(name)(import_module(module))))
