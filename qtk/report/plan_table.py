"""A plan as tables: the quantized values, and the values left in float."""

from __future__ import annotations

from collections import Counter

from qtk.core.plan import QuantPlan, SitePlan
from qtk.report.table import Column, Table


def plan_table(plan: QuantPlan) -> Table:
    """Every quantized site in graph order."""
    rows = tuple(
        (site.name, *str(decided.spec).split(" ", 1), decided.source + _bounds(decided), decided.reason)
        for site, decided in plan.items()
    )
    columns = ("site", "dtype", "granularity", "range", "reason")
    return Table(f"{len(rows)} quantized values", tuple(map(Column, columns)), rows)


def unquantized_table(plan: QuantPlan) -> Table:
    """Every value left in float, with the reason."""
    rows = tuple((site.name, reason) for site, reason in plan.unquantized.items())
    return Table(f"{len(rows)} values in float", (Column("site"), Column("reason")), rows)


def plan_summary(plan: QuantPlan) -> str:
    """One line with the number of quantizers per format.

    >>> plan_summary(QuantPlan({}))
    'no quantizers'
    """
    leaders = [decided.spec for decided in plan.values() if decided.leader is None]
    counts = Counter(f"{spec.dtype} {'symmetric' if spec.symmetric else 'asymmetric'}" for spec in leaders)
    if not counts:
        return "no quantizers"
    shared = len(plan) - len(leaders)
    return (f"{len(leaders)} quantizers: " + ", ".join(f"{count} × {name}" for name, count in counts.items())
            + (f"; {shared} values share one" if shared else ""))


def _bounds(decided: SitePlan) -> str:
    if decided.bounds is None:
        return ""
    low, high = ("" if bound is None else f"{bound:g}" for bound in decided.bounds)
    return f", within {low} … {high}"
