"""Does the prepared model compute what the original computes?"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from qtk.errors import VerificationError
from qtk.graph.capture import first_line

TOLERANCE = 1e-5
"""Largest difference, relative to the largest output, that reordered float32 sums may make."""


def eval_difference(original: nn.Module, prepared: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Largest absolute difference over all outputs in eval mode.

    Raises: VerificationError naming the first output that differs by more than ``TOLERANCE``.
    """
    with torch.no_grad():
        return _difference(_run(original, args, kwargs), _run(prepared, args, kwargs))


def train_difference(original: nn.Module, prepared: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Largest absolute difference of outputs and updated buffers after one step in train mode, dropout off.

    Both run as copies: no statistic of either model changes.

    Raises: VerificationError naming the first output or buffer that differs by more than ``TOLERANCE``.
    """
    both = []
    for model in (original, prepared):
        twin = copy.deepcopy(model).train()
        with torch.no_grad(), _WithoutDropout():
            both.append((_run(twin, args, kwargs), dict(twin.named_buffers())))
    (expected, wanted), (found, updated) = both
    return max(
        _difference(expected, found),
        _difference(wanted, {name: buffer for name, buffer in updated.items() if name in wanted}),
    )


class _WithoutDropout(TorchFunctionMode):
    """Every dropout function returns its input."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "dropout" in getattr(func, "__name__", ""):
            return args[0]
        return func(*args, **(kwargs or {}))


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    args, kwargs = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(*args, **kwargs)


def _difference(expected: object, found: object) -> float:
    wanted, structure = pytree.tree_flatten_with_path(expected)
    got, other = pytree.tree_flatten_with_path(found)
    if structure != other:
        raise VerificationError(f"the outputs are built differently: {structure} became {other}")
    worst = 0.0
    for (path, a), (_, b) in zip(wanted, got, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if type(a) is not type(b) or a != b:
                raise VerificationError(f"output{pytree.keystr(path)} is {b!r}, was {a!r}")
            continue
        worst = max(worst, _tensor_difference(f"output{pytree.keystr(path)}", a, b))
    return worst


def _tensor_difference(name: str, a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        raise VerificationError(
            f"{name} is {b.dtype} of shape {tuple(b.shape)}, was {a.dtype} of {tuple(a.shape)}"
        )
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
    same = (wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan())
    gap = torch.where(same, 0.0, (wide_a - wide_b).abs()).nan_to_num(nan=math.inf)
    size = float(wide_a[wide_a.isfinite()].abs().max()) if bool(wide_a.isfinite().any()) else 0.0
    worst = float(gap.max())
    if worst > TOLERANCE * size:
        raise VerificationError(f"{name} differs by {worst:.3g}, its largest value is {size:.3g}")
    return worst


def failure(error: Exception) -> str:
    """A train-mode mismatch as a line for the report."""
    return (
        "train mode is not the original's (its forward may branch on self.training, which capture decides in eval "
        f"mode): {first_line(error)}"
    )
