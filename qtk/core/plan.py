"""The plan of a simulation: which values are quantized, how, and by which rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.public import public


@public
@dataclass(frozen=True, slots=True)
class SitePlan:
    """The decision for one site.

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
        """Where the encoding comes from: run time, other sites, a fixed range, or a scheme.

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
        """One line a difference: ``-`` only in this plan, ``+`` only in ``other``, ``~`` in both but different."""
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
