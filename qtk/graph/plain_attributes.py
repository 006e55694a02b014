"""The plain attributes of an original module, which its stand-in in a prepared model lets users read."""

from __future__ import annotations

from collections.abc import Mapping
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
        self._values = {name: value for name, value in own.items() if name != "training" and _is_data(value)}
        self._others = own.keys() - self._values.keys()

    def __deepcopy__(self, memo: dict[int, object]) -> PlainAttributes:
        return self

    def read(self, name: str) -> object:
        """The value of an attribute. Raises: AttributeError saying where it is, if anywhere."""
        if name in self._values:
            return self._values[name]
        if name in self._others:
            raise AttributeError(f"a prepared model has no {name!r}, which holds modules, tensors or code in the "
                                 f"original {self._type.__name__}; read it there")
        if not name.startswith("_") and hasattr(self._type, name):
            raise AttributeError(f"a prepared model has no {name!r}, which is code of {self._type.__name__}; use it on "
                                 "the original model")
        raise AttributeError(f"neither the prepared model nor the original {self._type.__name__} has {name!r}")


def _is_data(value: object) -> bool:
    """Whether a value holds no module, tensor or function, not even in its own attributes."""
    leaves = pytree.tree_leaves(value)
    held = [item for leaf in leaves if isinstance(attributes := getattr(leaf, "__dict__", None), Mapping)
            for item in pytree.tree_leaves(dict(attributes))]
    return not any(isinstance(leaf, CODE) for leaf in (*leaves, *held))
