"""The sites that can be left precise, ranked by what quantizing them adds to the error of the outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qtk.report.sensitivities import Sensitivity

MOST_RECOVERED = 0.5
"""The largest share of the sites that are left precise by what they recover: about all activations, or all weights."""

LEFT = 0.25
"""What a set of sites leaves of the error that the set before leaves: 6 dB less."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Two orders of the sites, for errors are seen from the simulation and from the float model.

    Where single errors are large, what one precise site recovers says what the next trial gains. It says nothing of
    errors that hide one another: with two of three ruined values in front of a logarithm precise, the third ruins the
    result. What each site adds alone to the float model is small and adds up, so that the sum over the quantized sites
    forecasts the error.

    Args:
        recovered: sites without which the simulation has a smaller error, the largest difference first.
        alone: site → the error of the outputs if it alone is quantized; NaN: unknown.

    >>> ranking = Ranking(("b", "c", "a", "d"), {"a": 0.8, "b": 0.1, "c": 0.09, "d": 0.01})
    >>> ranking.by_recovery()
    [('b',), ('b', 'c')]
    >>> ranking.by_increase()
    [('a',), ('a', 'b', 'c')]
    """

    recovered: tuple[str, ...]
    alone: Mapping[str, float]

    @classmethod
    def of(cls, rows: Iterable[Sensitivity], names: Mapping[str, str]) -> Ranking:
        """The ranking of measured sites; a site whose recovery was not measured goes by the estimate of its increase.

        Args:
            rows: of single sites.
            names: name of a site → the name by which it is left precise, of several sites maybe.
        """
        recovered: dict[str, float] = {}
        alone: dict[str, float] = {}
        for row in rows:
            if (name := names.get(row.name)) is not None:
                gain = row.increase if math.isnan(row.recovery) else row.recovery
                recovered[name] = max(gain, recovered.get(name, 0.0))
                alone[name] = alone.get(name, 0.0) + max(row.increase, 0.0)
        gaining = (name for name, gain in recovered.items() if gain > 0)
        return cls(tuple(sorted(gaining, key=lambda name: -recovered[name])), alone)

    def by_recovery(self) -> list[tuple[str, ...]]:
        """Sets of the sites that recover most, each of twice as many, up to half of all."""
        most = max(1, int(MOST_RECOVERED * len(self.recovered)))
        counts = [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
        return [self.recovered[:count] for count in counts] if self.recovered else []

    def by_increase(self) -> list[tuple[str, ...]]:
        """Sets of the sites that add most, each of as many as leave 6 dB less, up to all but one."""
        known = {name: 0.0 if math.isnan(error) else error for name, error in self.alone.items()}
        order = sorted(known, key=lambda name: -known[name])
        found, limit = [], LEFT * math.fsum(known.values())
        for count in range(1, len(order)):
            left = math.fsum(known[name] for name in order[count:])
            if left < limit or count == len(order) - 1:
                found.append(tuple(order[:count]))
                limit = LEFT * left
        return found
