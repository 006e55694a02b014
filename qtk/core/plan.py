"""The plan of a simulation: which values are quantized, how, and by which rule; how users name its sites."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.public import public
from qtk.registry import nearest


@public
@dataclass(frozen=True, slots=True)
class SitePlan:
    """Says how one site is quantized, and why.

    Args:
        spec: what the quantizer produces.
        scheme: how the range is found; not used by dynamic quantization.
        static: the value depends on parameters alone and needs no calibration data.
        range: fixed real range (sigmoid: 0 to 1); not calibrated.
        min_fill: the share of ``range`` that data must fill, or the range is calibrated within it; 0: always fixed.
        bounds: lower and upper limit of the calibrated range; ``None``: no limit.
        leader: the site whose quantizer, and so whose encoding, this one shares.
        is_cache: keys or values of attention, as a cache holds them.
        factors: of an int32 bias, the sites of the input and the weight of its op: its scale is the product of theirs.
        reason: the rule that decided it, in words.
    """

    spec: QuantSpec
    scheme: str
    static: bool = False
    range: tuple[float, float] | None = None
    min_fill: float = 0.0
    bounds: tuple[float | None, float | None] | None = None
    leader: Site | None = None
    factors: tuple[Site, Site] | None = None
    is_cache: bool = False
    reason: str = ""

    @property
    def source(self) -> str:
        """Says where the encoding comes from: run time, other sites, a fixed range, or a scheme.

        >>> from qtk.core.dtypes import dtype
        >>> SitePlan(QuantSpec(dtype("uint8")), "mse").source
        'mse'
        """
        if self.spec.dynamic:
            return "at run time"
        if self.leader is not None:
            return f"as {self.leader}"
        if self.factors is not None:
            return " × ".join(map(str, self.factors))
        if self.range is None:
            return self.scheme
        return f"range {self.range}" + (f", {self.scheme} if filled below {self.min_fill:.0%}" if self.min_fill else "")


@public
@dataclass(frozen=True)
class QuantPlan(Mapping[Site, SitePlan]):
    """The plan of a whole model: a mapping from site to its decision, in graph order.

    Args:
        sites: the quantized values.
        unquantized: the values left in float, each with the reason.
    """

    sites: Mapping[Site, SitePlan]
    unquantized: Mapping[Site, str] = field(default_factory=dict)

    def __getitem__(self, site: Site) -> SitePlan:
        return self.sites[site]

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def diff(self, other: QuantPlan) -> list[str]:
        """Returns one line a difference: ``-`` only in this plan, ``+`` only in ``other``, ``~`` in both, changed."""
        lines = [f"- {site}: {plan.spec}" for site, plan in self.sites.items() if site not in other.sites]
        lines += [f"+ {site}: {plan.spec}" for site, plan in other.sites.items() if site not in self.sites]
        lines += [
            f"~ {site}: {plan.spec} → {other.sites[site].spec}"
            for site, plan in self.sites.items()
            if site in other.sites and plan != other.sites[site]
        ]
        return lines

    def __str__(self) -> str:
        rows = [f"{site}  {plan.spec}  {plan.source}  ({plan.reason})" for site, plan in self.sites.items()]
        rows += [f"{site}  float  ({reason})" for site, reason in self.unquantized.items()]
        return "\n".join(rows)


def leaders(plan: QuantPlan, names: Iterable[str] | str | None = None) -> dict[Site, None]:
    """The leaders (sites that own their encoding), in plan order: all, or a selection by names or globs.

    The name of a follower selects its leader; int32 biases, whose scale follows from two other sites, are left out.

    Raises: CalibrationError for a name or glob that matches no site, or sites in float alone.
    """
    if names is None:
        return dict.fromkeys(
            site for site, decided in plan.items() if decided.leader is None and decided.factors is None
        )
    wanted: set[Site] = set()
    for name in [names] if isinstance(names, str) else names:
        if not isinstance(name, str):  # of an iterator, whose elements nobody could look at before
            raise CalibrationError(f"a site is given by name, got {name!r}; print(sim.plan) shows all")
        matching = [site for site in plan if _matches(site, name)]
        if not matching:
            for site, reason in plan.unquantized.items():
                if _matches(site, name):
                    raise CalibrationError(f"{site.name} is in float: {reason}; choose sites that are quantized")
            hint = nearest(name, [site.name for site in plan])
            raise CalibrationError(f"no site is called {name!r}; {hint}; print(sim.plan) shows all")
        wanted |= {plan[site].leader or site for site in matching}
    return dict.fromkeys(site for site in plan if site in wanted and plan[site].factors is None)


def _matches(site: Site, name: str) -> bool:
    glob = name.replace("[", "[[]")  # ports are numbered in brackets
    return site.name == name or fnmatch.fnmatchcase(site.name, glob)
