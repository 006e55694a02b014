"""The plain attributes of an original module, which its stand-in in a prepared model lets users read."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType

from torch import Tensor, nn

from qtk.torch_private import pytree

CODE = (nn.Module, Tensor, FunctionType, MethodType, BuiltinFunctionType)
"""What is no data: a prepared model has its own parameters, and code in its graph."""


class PlainAttributes:
    """Name → value of the attributes of a module that hold data: a config, numbers, names. Copies share them.

    >>> linear = nn.Linear(3, 4)
    >>> attributes = PlainAttributes(linear)
    >>> attributes.read("in_features")
    3
    >>> attributes.read("reset_parameters")
    Traceback (most recent call last):
    AttributeError: a prepared model has no 'reset_parameters', which is code of Linear; use it on the original model
    """

    def __init__(self, original: nn.Module) -> None:
        self._type = type(original)
        own = {name: value for name, value in vars(original).items() if not name.startswith("_")}
        self._values = {name: value for name, value in own.items() if name != "training" and is_data(value)}
        self._others = own.keys() - self._values.keys()

    @property
    def kind(self) -> type:
        """The class of the module."""
        return self._type

    def __deepcopy__(self, memo: dict[int, object]) -> PlainAttributes:
        return self

    def __reduce__(self) -> tuple[Callable[..., PlainAttributes], tuple[type, dict[str, object], set[str]]]:
        """Leaves out, with a warning, what cannot be pickled: a lock, an open file; nothing in a graph reads it.

        A class made at run time, by a parametrization, stands as the nearest base that can be pickled.
        """
        values = {name: value for name, value in self._values.items() if _is_picklable(value)}
        lost = [name for name in self._values if name not in values]
        if lost:
            warnings.warn(f"the copy is without {', '.join(lost)} of {self._type.__name__}, which cannot be pickled; "
                          "the graph does not read it", stacklevel=2)
        kind = next(base for base in self._type.__mro__ if _is_picklable(base))
        return _restored, (kind, values, {*self._others, *lost})

    def read(self, name: str) -> object:
        """The value of an attribute. Raises: AttributeError saying where it is, if anywhere."""
        if name in self._values:
            return self._values[name]
        if name in self._others:
            raise AttributeError(f"a prepared model has no {name!r}, which holds modules, tensors, code or what "
                                 f"cannot be pickled in the original {self._type.__name__}; read it there")
        if not name.startswith("_") and hasattr(self._type, name):
            raise AttributeError(f"a prepared model has no {name!r}, which is code of {self._type.__name__}; use it on "
                                 "the original model")
        raise AttributeError(f"neither the prepared model nor the original {self._type.__name__} has {name!r}")


def _restored(kind: type, values: dict[str, object], others: set[str]) -> PlainAttributes:
    restored = PlainAttributes.__new__(PlainAttributes)
    restored._type, restored._values, restored._others = kind, values, others
    return restored


def _is_picklable(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # whatever the reduction of a user's class raises
        return False
    return True


def is_data(value: object) -> bool:
    """Says whether a value holds no module, tensor or function, not even in its own attributes."""
    leaves = pytree.tree_leaves(value)
    held = [item for leaf in leaves if isinstance(attributes := getattr(leaf, "__dict__", None), Mapping)
            for item in pytree.tree_leaves(dict(attributes))]
    return not any(isinstance(leaf, CODE) for leaf in (*leaves, *held))
