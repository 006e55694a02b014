"""Experts that too few rows of the data meet, matrices of a stack or layers: they take the statistics of all rows.

The Gram matrix of fewer rows than columns is singular: it says of most directions that their errors cost nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

from qtk.layerwise.layer_input import LayerInput
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.moments.pooled import pooled, pooled_layer
from qtk.moments.second_moments import SecondMoments
from qtk.numerics.im2col import weight_to_gemm

LISTED = 3
"""Weights that the warning names, and matrices of each."""


class StarvedMatrices:
    """Collects them over the layers of a run, for its report and one warning at its end.

    Args:
        groups: layers that are the same layer of several experts (``sibling_experts``).
    """

    def __init__(self, groups: Iterable[Sequence[WeightedLayer]] = ()) -> None:
        self.found: dict[str, str] = {}
        """Name of a weight → how many rows met it, or some of its matrices."""
        self._groups = {layer: group for layers in groups for group in [_Group(len(layers))] for layer in layers}

    def ready(self, layer_input: LayerInput) -> list[LayerInput]:
        """The layers whose statistics are complete: an expert that few rows met waits for the rows of all others."""
        group = self._groups.get(layer_input.layer)
        if group is None:
            return [layer_input]
        group.add(layer_input)
        columns = weight_to_gemm(layer_input.layer.weight.detach(), layer_input.layer.geometry).shape[-1]
        is_starved = _rows(layer_input) < columns
        if is_starved:
            group.waiting.append(layer_input)
        ready = [] if is_starved else [layer_input]
        if group.missing:
            return ready
        for waiting in group.waiting:
            if group.total is not None and len(group.rows) > 1:
                self.found[waiting.layer.name] = f"met {_rows(waiting)} rows"
                waiting = replace(waiting, moments=pooled_layer(_rows(waiting), group.total))
            ready.append(waiting)
        return ready

    def pooled(self, name: str, moments: SecondMoments) -> SecondMoments:
        """The statistics of a layer, of all rows where a matrix of its stack met fewer rows than it has columns."""
        counts = moments.counts
        if counts is None or len(counts) == 1 or not sum(counts):
            return moments
        few = {index: count for index, count in enumerate(counts) if count < moments.columns}
        if few:
            shown = ", ".join(f"{index} met {count} rows" for index, count in list(few.items())[:LISTED])
            self.found[name] = f"{len(few)} of {len(counts)} ({shown}{', …' if len(few) > LISTED else ''})"
        return pooled(moments, list(few))

    def warn(self) -> None:
        """Warns of what was found."""
        if not self.found:
            return
        named = "; ".join(f"{name}: {text}" for name, text in list(self.found.items())[:LISTED])
        more = "; …" if len(self.found) > LISTED else ""
        warnings.warn(
            f"in {len(self.found)} weights of experts or other stacks some met fewer rows of data than they have "
            f"columns, and were rounded by the Gram matrix of all rows: {named}{more}; calibrate with more data, that "
            "reach all of them, or with LayerwiseOptions(calibrate_all_experts=True)", stacklevel=4,
        )


class _Group:
    """The layers of several experts that a walk has reached.

    Args:
        missing: how many it has not reached.
    """

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.rows = set[int]()
        self.total: SecondMoments | None = None
        self.waiting: list[LayerInput] = []

    def add(self, layer_input: LayerInput) -> None:
        self.missing -= 1
        self.rows.add(_rows(layer_input))
        moments = layer_input.moments
        if moments is not None and moments.rows:
            if self.total is None:
                self.total = SecondMoments(moments.geometry, moments.required)
            self.total.merge(moments)


def _rows(layer_input: LayerInput) -> int:
    return 0 if layer_input.moments is None else layer_input.moments.rows
