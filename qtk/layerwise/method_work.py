"""What methods need to solve a layer: matrices in memory, and multiplications, each with an addition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qtk.layerwise.adaround import AdaRound
from qtk.layerwise.bias_correction import BiasCorrection
from qtk.layerwise.coordinate_descent import CoordinateDescent
from qtk.layerwise.gptq import Gptq
from qtk.layerwise.methods import LayerwiseMethod
from qtk.layerwise.seq_mse import SeqMse


@dataclass(frozen=True, slots=True)
class Work:
    """What a method needs to solve a layer [outputs, columns].

    Args:
        grams: float32 matrices [columns, columns] at a time.
        weights: float32 matrices [outputs, columns] at a time.
        cubes: multiplications by columns³.
        products: multiplications by outputs · columns².
        rewrites: whether it changes weights or biases, not encodings alone.
    """

    grams: float
    weights: float
    cubes: float
    products: float
    rewrites: bool = True


ROUNDING, OTHER = Work(0, 3, 0, 0), Work(0, 3, 1, 1)
"""Of rounding alone, and of a method that is not listed, where layers are compared."""

WORK: Mapping[type[object], Work] = {
    Gptq: Work(2.5, 13, 1.0, 5), CoordinateDescent: Work(2.5, 13, 1.2, 7), AdaRound: Work(2, 21, 1.5, 120),
    SeqMse: Work(0, 5, 0.1, 4, rewrites=False), BiasCorrection: Work(0, 6, 0, 1),
}
"""Matrices at a time are counted, not guessed: ``tests/layerwise/test_method_work.py``."""


def multiplications(works: Iterable[Work], groups: int, outputs: int, columns: int, block: int) -> float:
    """Says how many it takes to solve a layer of ``groups`` matrices, whose Gram matrices are of ``block`` columns
    each.

    >>> multiplications([Work(0, 0, 1, 5)], 1, 100, 10, 10)
    51000.0
    """
    return float(groups * sum(each.cubes * columns * block**2 + each.products * outputs * columns * block
                              for each in works))


def relative_cost(methods: Iterable[LayerwiseMethod], groups: int, outputs: int, columns: int, block: int) -> float:
    """Returns what a layer costs over what others cost; arguments as of ``multiplications``."""
    return multiplications([WORK.get(type(each), OTHER) for each in methods], groups, outputs, columns, block)
