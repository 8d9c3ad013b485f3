"""Charts: well-formed SVG whose points lie where the numbers say."""

import itertools
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.view.chart import draw_chart, plot_svg, ticks
from viva.view.series import Series, smooth, thin

SVG = "{http://www.w3.org/2000/svg}"

FINITE = st.floats(min_value=-1e200, max_value=1e200)


@st.composite
def a_series(draw: st.DrawFn) -> Series:
    xs = draw(st.lists(st.integers(-1000, 1000), min_size=1, max_size=30, unique=True).map(sorted))
    ys = draw(st.lists(FINITE, min_size=len(xs), max_size=len(xs)))
    widths = st.lists(st.floats(0, 1e200), min_size=len(xs), max_size=len(xs)).map(tuple)
    return Series(
        name=draw(st.text(max_size=10)),
        points=tuple(zip(map(float, xs), ys, strict=True)),
        band=draw(st.none() | widths),
    )


@given(st.lists(a_series(), min_size=1, max_size=8), st.text(max_size=20))
def test_any_curves_give_well_formed_svg_inside_its_frame(series: list[Series], title: str) -> None:
    root = ElementTree.fromstring(plot_svg(series, title=title, y_label=title))
    circles = root.findall(f"{SVG}circle")
    assert len(circles) == sum(len(curve.points) for curve in series)
    for circle in circles:
        assert 0 <= float(circle.attrib["cx"]) <= 720
        assert 0 <= float(circle.attrib["cy"]) <= 360


def test_points_are_where_the_numbers_say() -> None:
    svg = draw_chart([Series(name="y", points=((0, 0.0), (5, 1.0), (10, 0.25)))], label="y")
    places = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert (y0 - y2) / (y0 - y1) == pytest.approx(0.25, abs=0.01)
    assert "y, 5: 1" in svg


def test_a_band_reaches_its_half_width_above_and_below() -> None:
    curve = Series(name="y", points=((0, 0.5), (1, 0.5)), band=(0.1, 0.2))
    polygon = re.findall(r'<polygon[^>]*points="([^"]+)"', draw_chart([curve], label="y"))[0]
    ys = [float(point.split(",")[1]) for point in polygon.split()]
    line = re.findall(r'cy="([\d.]+)"', draw_chart([curve], label="y"))
    middle = float(line[0])
    assert [round((y - middle) / (ys[3] - middle), 1) for y in ys] == [-1.0, -2.0, 2.0, 1.0]


@given(FINITE, st.floats(min_value=1e-6, max_value=1e100), st.integers(3, 9))
def test_ticks_are_few_equally_spaced_and_inside(low: float, width: float, max_ticks: int) -> None:
    high = low + width
    if high - low < 1e-6 * abs(low):
        return
    found = ticks(low, high, max_ticks)
    assert len(found) <= max_ticks
    slack = 1e-6 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in found)
    gaps = [right - left for left, right in itertools.pairwise(found)]
    assert all(gap == pytest.approx(gaps[0], rel=1e-3) for gap in gaps)


def test_ticks_of_steps_are_whole_numbers() -> None:
    assert ticks(0, 3, 9, whole=True) == [0, 1, 2, 3]
    assert ticks(0, 30, 5) == [0, 10, 20, 30]


@given(st.lists(FINITE, min_size=1, max_size=3000), st.integers(8, 200))
def test_thinning_keeps_both_ends_the_extremes_and_the_order(ys: list[float], max_points: int) -> None:
    points = [(float(x), y) for x, y in enumerate(ys)]
    kept = thin(points, max_points)
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    assert len(kept) <= max(max_points + 4, 4)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert (min(y for _, y in kept), max(y for _, y in kept)) == (min(ys), max(ys))


def test_a_long_run_is_drawn_with_a_few_marks_that_are_seen_only_under_the_cursor() -> None:
    svg = draw_chart([Series(name="y", points=tuple((x, x % 7) for x in range(100_000)))], label="y")
    assert svg.count('<circle class="dot far') == svg.count("<circle") < 80
    assert len(svg) < 40_000


def test_a_mark_tells_the_value_and_its_interval() -> None:
    svg = draw_chart([Series(name="y", points=((0, 1.5), (1, 2)), band=(0.25, 0.0))], label="y")
    assert re.findall("<title>(.*?)</title>", svg) == ["y, 0: 1.5 \u00b1 0.25", "y, 1: 2"]


@given(st.lists(FINITE, min_size=1, max_size=50), st.floats(0, 0.99))
def test_smoothing_stays_within_the_values_and_begins_at_the_first(ys: list[float], factor: float) -> None:
    found = smooth(ys, factor)
    assert found[0] == ys[0]
    slack = 1e-9 * max(map(abs, ys)) + 1e-300
    assert all(min(ys) - slack <= value <= max(ys) + slack for value in found)
    assert smooth(ys, 0.0) == ys


def test_a_smoothed_line_is_there_for_pages_and_not_in_a_file_of_its_own() -> None:
    series = Series(name="y", points=tuple((x, x % 3) for x in range(9)))
    assert draw_chart([series], label="y").count("line smooth") == 1
    assert "line smooth" not in plot_svg([series])


def test_more_curves_than_colours_are_told_apart_by_dashes() -> None:
    svg = draw_chart([Series(name=str(i), points=((0, i), (1, i))) for i in range(8)], label="y")
    classes = re.findall(r'polyline class="([^"]+)"', svg)
    assert len(set(classes)) == 8


def test_the_file_holds_the_text_returned(tmp_path: Path) -> None:
    text = plot_svg([Series(name="y", points=((0, 1), (1, 2)))], output=tmp_path / "y.svg")
    assert (tmp_path / "y.svg").read_text(encoding="utf-8") == text


def test_nothing_to_draw_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"none of \['empty'\] has a point"):
        plot_svg([Series(name="empty", points=())])


def test_a_series_that_goes_back_is_refused() -> None:
    with pytest.raises(ValueError, match="'y': x must rise"):
        Series(name="y", points=((1, 0), (1, 1)))


def test_a_band_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="1 half-widths for 2 points"):
        Series(name="y", points=((0, 0), (1, 1)), band=(0.1,))
