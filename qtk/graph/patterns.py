"""What models spell out in small ops though it is one op to a quantizer. To add a pattern, add a row.

A spelling is plain torch code. Its arguments called ``weight`` and ``bias`` are parameters of the op, ``eps`` and
``factor`` any number, ``cos`` and ``sin`` what the model likes; every other name is data. Numbers in the code are part
of what it computes, its axes are not: any will do, if they are the same everywhere in one match. ``pattern_matcher``
says which spellings are the same; only what it tells apart needs one of its own.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from qtk.graph.pattern_matcher import NormalForm, PatternMatcher, SpellingMatch, inner_ops
from qtk.graph.sites import EXCLUDED, note

Spelling: TypeAlias = Callable[..., Tensor]

Core: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(x, eps) → two factors of a norm: what is scaled, and by what."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """One op and how it is written.

    Args:
        kind: of the op table, ``l2_normalize``, ``rotary`` or ``gate``.
        spellings: see above.
    """

    kind: str
    spellings: tuple[Spelling, ...]


@dataclass(frozen=True, slots=True)
class PatternMatch:
    """A spelled-out op in a graph.

    Args:
        kind: which.
        nodes: its ops in graph order; the last makes the value.
        weight: what the spelling's ``weight`` is, perhaps behind reshapes; ``None`` if it has none.
        bias: likewise.
    """

    kind: str
    nodes: tuple[fx.Node, ...]
    weight: fx.Node | None
    bias: fx.Node | None


# Norms: two factors, times a weight, plus a bias.


def _centered(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _square_mean(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


def _variances(x: Tensor) -> tuple[Tensor, ...]:
    return (
        _square_mean(_centered(x)),
        x.var(-1, keepdim=True),
        _square_mean(x) - x.mean(-1, keepdim=True).square(),
    )
