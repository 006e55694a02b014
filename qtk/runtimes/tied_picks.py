"""Simulations that pick the lowest index of equal scores, as ONNX says of TopK; torch leaves open which it picks.

Scores of few bits are often equal. A file that picks other indices than the simulation of the same scores departs from
no number that was simulated, so both are compared by one rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qtk.graph.graphs import graphs
from qtk.graph.sites import value_site
from qtk.report.verdict import Finding, Level
from qtk.torch_private import TorchDispatchMode

LISTED = 3
"""Picks that a finding lists."""

_ATEN = torch.ops.aten


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return (values, indices) if x.ndim == 0 else (values.narrow(dim, 0, k), indices.narrow(dim, 0, k))


def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    return torch.sort(x, dim=dim, descending=descending, stable=True)


PICKS: Mapping[Callable[..., object], Callable[..., tuple[Tensor, Tensor]]] = {
    _ATEN.topk.default: _topk, _ATEN.sort.default: _sort,
}
"""Operators that pick among equal values → the same with the lowest index first."""


@dataclass(slots=True)
class TiedPicks:
    """The indices that the lowest of equal scores replaced.

    Args:
        sites: where the simulation picks; empty: nowhere.
        picked: how many indices were picked.
        replaced: how many of these torch had picked otherwise, of equal scores.
    """

    sites: tuple[str, ...] = ()
    picked: int = 0
    replaced: int = 0

    def findings(self) -> list[Finding]:
        """Says what was compared where scores are equal; nothing if torch picked the lowest index too."""
        if not self.replaced:
            return []
        more = f" and {len(self.sites) - LISTED} more" if len(self.sites) > LISTED else ""
        return [Finding(
            Level.YELLOW, f"{self.replaced} of {self.picked} indices picked at {', '.join(self.sites[:LISTED])}{more} "
            "are of equal scores, of which torch picks any and runtimes the lowest index: the file is compared with "
            "the lowest", "16 bits for these scores leave fewer of them equal")]


@contextmanager
def lowest_index_first(model: nn.Module) -> Iterator[TiedPicks]:
    """While active, what picks among equal values takes the lowest index first, if a graph of ``model`` picks.

    >>> import qtk
    >>> class Best(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x.topk(2)
    >>> model = qtk.prepare_model(Best(), torch.randn(3))
    >>> with lowest_index_first(model) as ties:
    ...     model(torch.tensor([1.0, 2.0, 2.0])).indices
    tensor([1, 2])
    >>> ties.sites, ties.picked
    (('topk:out',), 2)
    """
    ties = TiedPicks(tuple(str(value_site(node)) for graph in graphs(model).values() for node in graph.graph.nodes
                           if node.target in PICKS))
    if not ties.sites:
        yield ties
        return
    with _Picking(ties):
        yield ties


class _Picking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces the indices that ops pick, where the values that they pick stay the same."""

    def __init__(self, ties: TiedPicks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ties = ties

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result: Any = func(*args, **(kwargs or {}))
        if func not in PICKS:
            return result
        values, indices = result
        lowest = PICKS[func](*args, **(kwargs or {}))
        if not torch.equal(values.nan_to_num(), lowest[0].nan_to_num()):
            return result  # in another order
        self.ties.picked += indices.numel()
        self.ties.replaced += int((indices != lowest[1]).sum())
        return lowest
