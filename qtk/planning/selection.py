"""Selects sites by names, or globs over names."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from qtk.core.plan import QuantPlan
from qtk.core.site import Site
from qtk.errors import CalibrationError
from qtk.registry import nearest


def leaders(plan: QuantPlan, names: Iterable[str] | str | None = None) -> dict[Site, None]:
    """The leaders (sites that own their encoding), in plan order: all, or those selected by names or globs.

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
