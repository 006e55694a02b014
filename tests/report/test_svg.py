"""Pictures, read back as XML: bars and edges lie where the numbers put them."""

import math
from xml.etree import ElementTree

import pytest

from qtk.report.svg import HEIGHT, WIDTH, HistogramChart, channels_svg, curve_svg, histogram_svg

SPACE = 14
"""Height that a histogram leaves for the bracket of its range."""


def parts(svg, kind):
    """The elements of a class."""
    root = ElementTree.fromstring(svg)
    return [part for part in root if part.get("class") == kind]


def boxes(svg, kind):
    """Left, top, width and height of the rectangles of a class."""
    return [tuple(float(part.get(name)) for name in ("x", "y", "width", "height")) for part in parts(svg, kind)]


@pytest.mark.parametrize("lowest", [-3.0, 0.0, 5.0])
@pytest.mark.parametrize("counts", [(1,), (3, 0, 7), (1, 10, 100, 1000, 0, 2, 5)])
def test_bars_are_as_high_as_the_logarithm_of_their_count(counts, lowest):
    svg = histogram_svg(HistogramChart(lowest, lowest + 2.0, counts, None))
    step, tallest = WIDTH / len(counts), math.log1p(max(counts))
    expected = [
        (index * step, HEIGHT - 12 - tall, step, tall)
        for index, count in enumerate(counts) if count for tall in [(HEIGHT - SPACE) * math.log1p(count) / tallest]
    ]
    assert boxes(svg, "bar") == [pytest.approx(each, abs=0.051) for each in expected]
    assert not parts(svg, "clipped")
    assert not parts(svg, "range")


def test_bins_whose_middle_is_outside_of_the_range_are_marked():
    svg = histogram_svg(HistogramChart(0.0, 8.0, (1, 2, 3, 4, 5, 6, 7, 8), (1.5, 5.4)))
    assert [x / WIDTH * 8 for x, *_ in boxes(svg, "bar")] == pytest.approx([1, 2, 3, 4], abs=0.01)
    assert [x / WIDTH * 8 for x, *_ in boxes(svg, "clipped")] == pytest.approx([0, 5, 6, 7], abs=0.01)


def test_a_range_that_is_wider_than_the_values_sets_the_edges():
    svg = histogram_svg(HistogramChart(-1.0, 1.0, (1, 1), (-3.0, 5.0)))
    (path,) = parts(svg, "range")
    assert path.get("d") == f"M0.0 {HEIGHT - 12}v6H{WIDTH:.1f}v-6"
    assert [(x, width) for x, _, width, _ in boxes(svg, "bar")] == [
        (WIDTH * 2 / 8, WIDTH / 8), (pytest.approx(WIDTH * 3 / 8, abs=0.051), WIDTH / 8)]


@pytest.mark.parametrize("histogram", [
    HistogramChart(0.0, 0.0, (5,), None), HistogramChart(2.0, 2.0, (1023,), (2.0, 2.0)),
    HistogramChart(0.0, 1.0, (0,) * 7, None),
    HistogramChart(0.0, 1.0, (), (0.0, 0.5)),
    HistogramChart(-1e30, 1e30, (1, 10**12), (-1e-30, 1e-30)),
])
def test_every_number_is_finite_for_values_that_are_equal_missing_or_huge(histogram):
    svg = histogram_svg(histogram)
    drawn = [*boxes(svg, "bar"), *boxes(svg, "clipped")]
    assert len(drawn) == sum(count > 0 for count in histogram.counts)
    for x, y, width, height in drawn:
        assert 0 <= x <= WIDTH
        assert 0 < width <= WIDTH
        assert 0 <= y <= y + height <= HEIGHT


@pytest.mark.parametrize(("lowest", "highest", "limit"), [
    ([-1.0], [2.0], [2.0]), ([-1.0, 0.5, -8.0], [3.0, 0.75, -4.0], [4.0, 0.5, 2.0]), ([0.0] * 7, [0.0] * 7, [1.0] * 7),
])
def test_channels_show_their_extent_over_the_band_of_their_codes(lowest, highest, limit):
    svg = channels_svg(lowest, highest, limit)
    most, step = max(map(abs, (*lowest, *highest, *limit))), WIDTH / len(lowest)
    for kind, pairs in (("grid", [(edge, -edge) for edge in limit]), ("bar", list(zip(highest, lowest, strict=True)))):
        expected = [
            (index * step, HEIGHT / 2 * (1 - top / most), 0.8 * step, max(HEIGHT / 2 * (top - bottom) / most, 0.5))
            for index, (top, bottom) in enumerate(pairs)
        ]
        assert boxes(svg, kind) == [pytest.approx(each, abs=0.051) for each in expected]


@pytest.mark.parametrize("count", [0, 1, 1023])
def test_channels_without_values_are_lines_in_the_middle(count):
    svg = channels_svg([0.0] * count, [0.0] * count, [0.0] * count)
    assert [box[1] for box in boxes(svg, "bar")] == [HEIGHT / 2] * count
    assert f"<title>{count} channels</title>" in svg


def test_a_curve_goes_through_its_values_and_an_exact_step_is_at_the_top():
    (path,) = parts(curve_svg([20.0, 40.0, math.inf, 30.0]), "curve")
    points = [tuple(map(float, point.split())) for point in path.get("d")[1:].split("L")]
    assert points == [(0, HEIGHT - 4), (WIDTH / 3, 4), (2 * WIDTH / 3, 4), (WIDTH, HEIGHT / 2)]
    assert parts(curve_svg([math.inf]), "curve")
