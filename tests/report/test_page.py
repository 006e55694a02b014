"""A page shows every site and section, escapes what it is given, and needs nothing from outside."""

import math
import re
from html.parser import HTMLParser

import pytest

from qtk.core.dtypes import dtype
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.report.page import Contents, colour, page, tree
from qtk.report.sensitivities import Sensitivities, Sensitivity
from qtk.report.site_errors import SiteError, SiteErrors
from tests.report.written_report import written


class Page(HTMLParser):
    """Tags, their attributes and the text of each table row and card."""

    VOID = ("meta", "input", "br", "path", "rect")

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.texts = [], [], {"tr": [], "div": [], "h2": []}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.attributes += attributes
        if tag in self.texts:
            self.texts[tag].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        for tag, texts in self.texts.items():
            if tag in self.open:
                texts[-1] += data


@pytest.mark.medium
def test_it_holds_every_site_and_needs_nothing_else(tmp_path):
    sim, _, text = written(tmp_path, title="a <b>title</b>")
    page = Page(text)
    assert not page.open
    assert "a &lt;b&gt;title" in text
    assert page.texts["h2"] == [
        "The sites with the largest error of their own", "What the output loses by each site",
        "Weights, channel by channel", "The model", "The plan"]
    for site in (*sim.plan, *sim.plan.unquantized):
        assert sum(row.startswith(f"{site.name}") for row in page.texts["tr"]) >= 1
    links = [value for name, value in page.attributes if name in ("src", "href", "srcset", "action")]
    assert not links
    assert not re.search(r"https?:|url\(|@import|fetch\(", text)


def plan_of(*sites):
    return QuantPlan({site: SitePlan(QuantSpec(dtype("int8")), "mse", reason="why") for site in sites})


SITES = (Site("", "input", "out"), Site("blocks.0.fc", "", "out"), Site("blocks.0.fc", "weight", ""),
         Site("blocks.1", "add", "out"), Site("head", "", "out"))


def errors_of(values):
    return SiteErrors(SiteError(site.name, 0.0, 0.0, own_sqnr_db=db) for site, db in zip(SITES, values, strict=False))


def branches(branch, path=()):
    """Path → the names of the sites and the worst SQNR there, outermost first."""
    found = {path: ([error.site for error in branch.sites], branch.worst)}
    for name, inner in branch.branches.items():
        assert inner.name == name
        found |= branches(inner, (*path, name))
    return found


def test_sites_hang_below_their_modules_with_the_worst_of_each():
    found = branches(tree(errors_of([50.0, 30.0, 20.0, math.nan, math.inf])[::-1], plan_of(*SITES)))
    assert found == {
        (): (["input:out"], 20.0), ("blocks",): ([], 20.0), ("blocks", "0"): ([], 20.0),
        ("blocks", "0", "fc"): (["blocks.0.fc:out", "blocks.0.fc.weight"], 20.0),
        ("blocks", "1"): (["blocks.1.add:out"], math.inf), ("head",): (["head:out"], math.inf),
    }
    assert list(found) == [(), ("blocks",), ("blocks", "0"), ("blocks", "0", "fc"), ("blocks", "1"), ("head",)]


def test_sites_without_an_error_are_no_part_of_the_tree():
    assert branches(tree(errors_of([50.0, 10.0]), plan_of(*SITES))) == {
        (): (["input:out"], 10.0), ("blocks",): ([], 10.0), ("blocks", "0"): ([], 10.0),
        ("blocks", "0", "fc"): (["blocks.0.fc:out"], 10.0)}
    assert branches(tree([], plan_of())) == {(): ([], math.inf)}


@pytest.mark.parametrize(("db", "hue"), [
    (-math.inf, 0), (9.9, 0), (25.0, 70), (32.5, 105), (40.1, 140), (math.inf, 140),
])
def test_the_hue_runs_from_red_to_green_between_the_two_bounds(db, hue):
    assert re.fullmatch(r"hsl\((\d+) \d+% \d+%\)", colour(db)).group(1) == str(hue)


def test_a_page_without_measurements_has_the_plan_alone():
    plan = QuantPlan({}, {SITES[0]: "left by <rule>"})
    text = page(Contents("nothing", {}, plan, SiteErrors(), notes=("Not shown: a & b",)))
    assert not Page(text).open
    assert Page(text).texts["h2"] == ["The sites with the largest error of their own", "The model", "The plan"]
    assert "Not shown: a &amp; b" in text
    assert "left by &lt;rule&gt;" in text


def test_the_data_of_the_figures_are_named():
    text = page(Contents("named", {}, plan_of(), SiteErrors(), measured_on="4 batches of <the data>"))
    assert "are of 4 batches of &lt;the data&gt;." in text


def test_gauges_are_shares_of_the_largest_increase():
    rows = [Sensitivity(name, (name,), rise, math.nan, exact, rise)
            for name, rise, exact in (("a", 2.0, True), ("b", 0.5, False), ("c", -1.0, True), ("d", math.nan, False))]
    text = page(Contents("costs", {}, plan_of(), SiteErrors(),
                         sensitivities=Sensitivities(rows, float_loss=0.0, loss=1.0)))
    assert re.findall(r'<i style="width:([\d.]+)%">', text) == ["100.0", "25.0", "0.0", "0.0"]
    assert re.findall(r"<td>(measured|estimated|no gradient)</td>", text) == [
        "measured", "estimated", "measured", "no gradient"]
