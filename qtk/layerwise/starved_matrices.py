"""Matrices of stacks, such as experts, that too few rows of the data meet: they take the statistics of all rows."""

from __future__ import annotations

import warnings

from qtk.moments.second_moments import SecondMoments

LISTED = 3
"""Weights that the warning names, and matrices of each."""


class StarvedMatrices:
    """Collects them over the layers of a run, for one warning at its end."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[dict[int, int], int]] = {}

    def pooled(self, name: str, moments: SecondMoments) -> SecondMoments:
        """The statistics of a layer, of all rows where a matrix met fewer rows than it has columns.

        The Gram matrix of so few rows is singular: it says of most directions that their errors cost nothing.
        """
        counts = moments.counts
        if counts is None or len(counts) == 1:
            return moments
        few = {index: count for index, count in enumerate(counts) if count < moments.columns}
        if few:
            self._found[name] = few, len(counts)
        return moments.pooled(list(few)) if sum(counts) else moments

    def warn(self) -> None:
        """Warns of what was found."""
        if not self._found:
            return
        named = "; ".join(_text(name, *found) for name, found in list(self._found.items())[:LISTED])
        more = "; …" if len(self._found) > LISTED else ""
        warnings.warn(
            f"in {len(self._found)} stacks of matrices (experts, heads) some met fewer rows of data than they have "
            f"columns, and were rounded by the Gram matrix of all rows: {named}{more}; calibrate "
            "with more data, that reach all of them", stacklevel=4,
        )


def _text(name: str, few: dict[int, int], matrices: int) -> str:
    shown = ", ".join(f"{index} met {count} rows" for index, count in list(few.items())[:LISTED])
    return f"{name}: {len(few)} of {matrices} ({shown}{', …' if len(few) > LISTED else ''})"
