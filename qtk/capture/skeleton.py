"""``Skeleton``: the modules of a captured model without their tensors, from which its own class can be made again."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from qtk.capture.tree import TABLES, with_islands
from qtk.errors import CaptureError, first_line
from qtk.torch_private import pytree

SKELETON = "qtk_skeleton"
"""Key of the ``meta`` of a prepared model."""

TENSORS = ("_parameters", "_buffers")
"""Attributes of a module that hold its tensors."""


class Skeleton:
    """The modules of a model, with its classes, hooks and plain attributes, and with no parameter or buffer.

    Copies of a prepared model share it. It is left out of a pickle where the classes in it cannot be pickled.

    >>> skeleton = Skeleton(nn.Linear(4, 2))
    >>> skeleton.filled({"weight": torch.ones(2, 4), "bias": torch.zeros(2)})(torch.ones(1, 4)).tolist()
    [[4.0, 4.0]]

    Args:
        model: the model; shares nothing with the skeleton but plain attributes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._root: nn.Module | None = None
        self._names: list[tuple[str, str, str]] = []
        self._reason = "a module of code that torch compiled has no copy"
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            return
        try:
            self._root = with_islands(model, {})
        except Exception as error:  # of a user's class that does without __init__
            self._reason = first_line(error)
            return
        for path, module in self._root.named_modules():
            for table in TENSORS:
                held = vars(module)[table]
                self._names += [(path, table, name) for name, value in held.items() if value is not None]
                held.update(dict.fromkeys(held))

    def __deepcopy__(self, memo: dict[int, object]) -> Skeleton:
        return self

    def __reduce__(self) -> tuple[Callable[..., Skeleton], tuple[object, ...]]:
        try:
            pickle.dumps(self._root)
        except Exception as error:  # whatever the reduction of a user's class raises
            return _restored, (None, [], f"its copy was pickled without it: {first_line(error)}")
        return _restored, (self._root, self._names, self._reason)

    def empty(self) -> nn.Module:
        """The model's own module, without tensors and with copies of its plain attributes, such as a ``config``.

        Raises: CaptureError if there is none.
        """
        if self._root is None:
            raise CaptureError(f"the class of the model cannot be made again: {self._reason}; load the weights of "
                               "sim.model.state_dict() into a model of your own")
        root = with_islands(self._root, {})
        memo: dict[int, object] = {id(module): module for module in root.modules()}
        for attributes in map(vars, root.modules()):
            for name in attributes.keys() - TABLES:
                memo |= {id(module): module for module in _modules_in(attributes[name])}
                with suppress(Exception):  # of a lock or a file, which stays shared
                    attributes[name] = copy.deepcopy(attributes[name], memo)
        return root

    def filled(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """A model of the original's class with these tensors, by their names; names of one tensor stay tied.

        Raises: CaptureError if one is missing.
        """
        root = self.empty()
        modules = dict(root.named_modules())
        for path, table, name in self._names:
            full = f"{path}.{name}" if path else name
            if full not in tensors:
                raise CaptureError(f"{full} of the original is no tensor of the prepared model any more, so its class "
                                   "cannot be made again; if its batch norms were folded, set fold_batch_norms: false "
                                   "in the config")
            value = tensors[full]
            is_parameter = table == "_parameters" and not isinstance(value, nn.Parameter)
            vars(modules[path])[table][name] = nn.Parameter(value, value.is_floating_point()) if is_parameter else value
        return root


def _modules_in(value: object, depth: int = 4) -> Iterator[nn.Module]:
    """The modules in an attribute; modules of no tree, such as a teacher in a list, stay shared."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, nn.Module):
            yield leaf
        elif depth and not isinstance(leaf, type):
            yield from _modules_in(getattr(leaf, "__dict__", None), depth - 1)


def _restored(root: Any, names: list[tuple[str, str, str]], reason: str) -> Skeleton:
    skeleton = Skeleton.__new__(Skeleton)
    skeleton._root, skeleton._names, skeleton._reason = root, names, reason
    return skeleton
