"""The operators of ``torch.library``: each is registered once, by its schema, reference, fake, kernels and gradient.

The reference, in PyTorch, serves every device that has no kernel; the fake serves tracers. The C++ library, where it is
built, has the kernels for CPUs. Of some operators (``native``) it also has the schema and the autograd of all devices,
at a tenth of the overhead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtk.kernels.backends import load_native, triton_unavailable

NATIVE = load_native() is None
"""Whether the C++ library is loaded."""


LAUNCHED_BY_NATIVE, BY_TRITON = ("qtk::fake_quantize",), "_by_triton"
"""Operators whose calls on a GPU the C++ library launches if it knows how, and else hands to one of this ending."""


class Gradient(NamedTuple):
    """The two functions of a gradient: ``save`` fills the context of a call, ``backward`` reads it."""

    save: Callable[[Any, tuple[Any, ...], Any], None]
    backward: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function of a module in ``qtk.kernels.gpu``, which is imported when it is called: Triton may be missing.

    It takes the arguments of the operator, in their order.
    """

    module: str
    function: str

    def __call__(self, *arguments: Any) -> Any:
        return getattr(importlib.import_module(f"qtk.kernels.gpu.{self.module}"), self.function)(*arguments)


@dataclass(frozen=True, slots=True)
class Operator:
    """A registered operator.

    Args:
        schema: name, arguments and results, in the language of ``torch.library.define``.
        reference: computes it on any device.
        fake: makes the results of a call for a tracer, without numbers.
        gpu: computes it on a GPU where Triton runs; ``None``: the reference does.
        gradient: ``None`` for an operator without one.
        native: whether the C++ library also has the schema and the autograd.
    """

    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    gpu: Callable[..., Any] | None
    gradient: Gradient | None
    native: bool

    @property
    def name(self) -> str:
        """``qtk::`` and the name."""
        return "qtk::" + self.schema.partition("(")[0]

    def on_gpu(self, *arguments: Any) -> Any:
        """Computes it by the kernel if Triton runs, else by the reference."""
        if self.gpu is None or triton_unavailable() is not None:
            return self.reference(*arguments)
        return self.gpu(*arguments)


OPERATORS: dict[str, Operator] = {}
"""Name → operator, of every module of ``qtk.ops`` that is imported."""


def register(
    schema: str, reference: Callable[..., Any], fake: Callable[..., Any], *,
    gpu: Callable[..., Any] | None = None, gradient: Gradient | None = None, native: bool = False,
) -> Any:
    """Registers an operator with ``torch.library``; arguments as ``Operator``. Returns: its overload, to be called.

    >>> double = register("doubled_in_doctest(Tensor x) -> Tensor", lambda x: 2 * x, torch.empty_like)
    >>> double(torch.ones(2)), torch.ops.qtk.doubled_in_doctest(torch.ones(2, device="meta")).shape
    (tensor([2., 2.]), torch.Size([2]))
    """
    operator = Operator(schema, reference, fake, gpu, gradient, native)
    name, is_defined = operator.name, native and NATIVE
    if not is_defined:
        torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, "CompositeExplicitAutograd", reference)
    if gpu is not None and native and NATIVE and name in LAUNCHED_BY_NATIVE:
        torch.library.define(name + BY_TRITON, schema[schema.index("(") :])
        torch.library.impl(name + BY_TRITON, "CUDA", operator.on_gpu)
    elif gpu is not None:
        torch.library.impl(name, "CUDA", operator.on_gpu)
    torch.library.register_fake(name, fake)
    if gradient is not None and not is_defined:
        torch.library.register_autograd(name, gradient.backward, setup_context=gradient.save)
    OPERATORS[name] = operator
    return getattr(torch.ops.qtk, name.removeprefix("qtk::")).default


def like_first(first: Tensor, *_: object) -> Tensor:
    """The fake of an operator whose result has the shape, dtype and layout of its first argument."""
    return torch.empty_like(first)


def nothing(*_: object) -> None:
    """The fake of an operator that only writes to its arguments."""
