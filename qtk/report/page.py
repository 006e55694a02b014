"""A report as one page of HTML that needs nothing else: no network, no other file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.util import find_spec

from qtk.core.plan import QuantPlan
from qtk.errors import ExportError
from qtk.report.account import Account
from qtk.report.data_report import DataReport
from qtk.report.drift import Drift
from qtk.report.sensitivities import Sensitivities
from qtk.report.site_errors import SiteError, SiteErrors
from qtk.report.svg import HistogramChart, channels_svg, curve_svg, histogram_svg

GOOD_DB, BAD_DB = 40.0, 10.0
"""Own SQNR from which a site is coloured as good, and below which it is coloured as bad."""


@dataclass(frozen=True, slots=True)
class ChannelRanges:
    """The values of a weight, channel by channel.

    Args:
        lowest: the smallest value of each channel.
        highest: the largest.
        limit: the largest magnitude that its codes stand for.
    """

    lowest: tuple[float, ...]
    highest: tuple[float, ...]
    limit: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a report shows.

    Args:
        title: of the page.
        headline: name → number with its unit, the most important first.
        plan: every site, how it is quantized, and why.
        errors: of the sites, worst first.
        histograms: site → its float values.
        weights: site of a weight → its channels.
        sensitivities: what each site costs at the output; ``None`` if not measured.
        drift: of a model with states, the error along the data; ``None`` of others.
        account: what was tried; ``None`` if nothing was searched.
        notes: what is not shown, and why.
        measured_on: the data of SQNR, errors, ranges and losses, in words; empty where there are none.
        data: whether the calibration data are enough; ``None`` if nobody asked.
    """

    title: str
    headline: Mapping[str, str]
    plan: QuantPlan
    errors: SiteErrors
    histograms: Mapping[str, HistogramChart] = field(default_factory=dict)
    weights: Mapping[str, ChannelRanges] = field(default_factory=dict)
    sensitivities: Sensitivities | None = None
    drift: Drift | None = None
    account: Account | None = None
    notes: tuple[str, ...] = ()
    measured_on: str = ""
    data: DataReport | None = None


@dataclass(slots=True)
class Branch:
    """A module in the tree: its name, the sites that are its own, and the modules in it."""

    name: str
    sites: list[SiteError] = field(default_factory=list)
    branches: dict[str, Branch] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """The lowest own SQNR in it, in dB; inf if nothing is quantized."""
        own = [site.own_sqnr_db for site in self.sites if not math.isnan(site.own_sqnr_db)]
        return min([*own, *(branch.worst for branch in self.branches.values())], default=math.inf)


def tree(errors: Sequence[SiteError], plan: QuantPlan) -> Branch:
    """The sites by the modules they are in, in the order of the plan."""
    owners = {site.name: site.owner for site in plan}
    by_name = {error.site: error for error in errors}
    root = Branch("model")
    for name in (name for name in owners if name in by_name):
        branch = root
        for part in filter(None, owners[name].split(".")):
            branch = branch.branches.setdefault(part, Branch(part))
        branch.sites.append(by_name[name])
    return root


def colour(sqnr_db: float) -> str:
    """A hue from red for ``BAD_DB`` or less to green for ``GOOD_DB`` or more, as CSS.

    >>> colour(40.0), colour(10.0), colour(float("nan"))
    ('hsl(140 55% 45%)', 'hsl(0 70% 50%)', 'hsl(0 0% 60%)')
    """
    if math.isnan(sqnr_db):
        return "hsl(0 0% 60%)"
    share = min(max((sqnr_db - BAD_DB) / (GOOD_DB - BAD_DB), 0.0), 1.0)
    return f"hsl({round(140 * share)} {round(70 - 15 * share)}% {round(50 - 5 * share)}%)"


def decibels_text(value: float) -> str:
    """A number of decibels, to be read.

    >>> decibels_text(31.25), decibels_text(float("inf")), decibels_text(float("nan"))
    ('31.2 dB', 'exact', '–')
    """
    return "–" if math.isnan(value) else "exact" if value == math.inf else f"{value:.1f} dB"


def require_jinja2() -> None:
    """Raises: ExportError if jinja2 is not installed."""
    if find_spec("jinja2") is None:
        raise ExportError('reports need jinja2; run: pip install "qtk[report]"')


def page(contents: Contents) -> str:
    """The whole page."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files("qtk.report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        contents=contents, tree=tree(contents.errors, contents.plan), colour=colour, db=decibels_text,
        isnan=math.isnan,
        histogram=histogram_svg, curve=curve_svg,
        channels=lambda each: channels_svg(each.lowest, each.highest, each.limit),
    )
