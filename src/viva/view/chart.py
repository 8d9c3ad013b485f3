"""Line charts as SVG, drawn here: no library, no script, readable on light and on dark.

Colours come from ``chart.css`` by class (``c0`` to ``c5``; later series take them again, dashed), so one
drawing serves the page, where the style stands once, and a file of its own, which carries it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from viva.view.markup import escape, format_number
from viva.view.series import Series, smooth, thin

__all__ = ["chart_css", "draw_chart", "plot_svg", "ticks"]

_NUM_COLOURS = 6
_MAX_MARKED_POINTS = 60
_MAX_DRAWN_POINTS = 800
_SMOOTHING = 0.9
_MIN_SMOOTHED_POINTS = 5
_CHAR_WIDTH = 6.2
_LEGEND_ROW = 17.0


def chart_css() -> str:
    """The style sheet that the classes of a chart refer to."""
    return resources.files("viva.view").joinpath("chart.css").read_text(encoding="utf-8")


def plot_svg(
    series: Sequence[Series],
    *,
    title: str = "",
    x_label: str = "step",
    y_label: str = "",
    size: tuple[int, int] = (720, 360),
    output: str | Path | None = None,
) -> str:
    """Draw curves as a stand-alone SVG file.

    Args:
        series: Curves, drawn in this order; bands below all lines.
        title: Heading; also the text that screen readers say.
        x_label: Name of the x axis.
        y_label: Name of the y axis.
        size: Width and height in pixels.
        output: File to write, if any.

    Returns:
        The SVG text.

    Raises:
        ValueError: If no series has a point.
    """
    body = _body(series, _Look(width=size[0], height=size[1], title=title, x_label=x_label, y_label=y_label))
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" aria-label="{escape(title)}" '
        f'width="{size[0]}" height="{size[1]}" viewBox="0 0 {size[0]} {size[1]}">\n'
        f"<style>\n{chart_css()}</style>\n"
        f'<rect class="paper" width="{size[0]}" height="{size[1]}" rx="6"/>\n{body}\n</svg>\n'
    )
    if output is not None:
        Path(output).write_text(text, encoding="utf-8")
    return text


def draw_chart(series: Sequence[Series], *, label: str, size: tuple[int, int] = (400, 210)) -> str:
    """Draw curves as an ``<svg>`` element for a page that holds `chart_css`; see `plot_svg`.

    Smoothed lines are drawn, too, for the page to show instead; its style sheet hides them.
    """
    body = _body(series, _Look(width=size[0], height=size[1], has_smooth=True))
    return (
        f'<svg class="chart" role="img" aria-label="{escape(label)}" viewBox="0 0 {size[0]} {size[1]}">'
        f"{body}</svg>"
    )


def ticks(low: float, high: float, max_ticks: int, *, whole: bool = False) -> list[float]:
    """Round values inside [low, high] at equal distances of 1, 2 or 5 times a power of ten.

    Args:
        low: Lower end.
        high: Upper end, above ``low``.
        max_ticks: At most this many, at least 2.
        whole: Only whole numbers.
    """
    raw = (high - low) / (max_ticks - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    if whole:
        step = max(1.0, step)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What is written around the curves."""

    width: float
    height: float
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    has_smooth: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Where data coordinates land in the drawing."""

    left: float
    right: float
    top: float
    bottom: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)


def _body(series: Sequence[Series], look: _Look) -> str:
    drawn = [curve for curve in series if curve.points]
    if not drawn:
        raise ValueError(f"nothing to draw: none of {[curve.name for curve in series]} has a point")
    legend, legend_height = _legend(drawn if len(drawn) > 1 else [], look)
    top = 10 + (24 if look.title else 0) + legend_height
    x_range = _x_range(drawn)
    y_range = _y_range(drawn)
    y_ticks = ticks(*y_range, max_ticks=max(3, int((look.height - top) / 28)))
    tick_width = max(len(format_number(tick)) for tick in y_ticks) * _CHAR_WIDTH
    frame = _Frame(
        left=12 + tick_width + (18 if look.y_label else 0),
        right=look.width - 14,
        top=top,
        bottom=look.height - (40 if look.x_label else 24),
        x_range=x_range,
        y_range=y_range,
    )
    x_ticks = ticks(*x_range, max_ticks=max(3, int(look.width / 90)), whole=_is_whole(drawn))
    parts = [legend, _axes(frame, look, x_ticks, y_ticks)]
    parts += [_band(curve, frame, index) for index, curve in enumerate(drawn) if curve.band is not None]
    parts += [_line(curve, frame, index) for index, curve in enumerate(drawn)]
    if look.has_smooth:
        parts += [_smoothed(curve, frame, index) for index, curve in enumerate(drawn)]
    parts += [_marks(curve, frame, index) for index, curve in enumerate(drawn)]
    return "".join(parts)


def _is_whole(drawn: Sequence[Series]) -> bool:
    return all(float(x).is_integer() for curve in drawn for x, _ in curve.points)


def _x_range(drawn: Sequence[Series]) -> tuple[float, float]:
    xs = [x for curve in drawn for x, _ in curve.points]
    low, high = min(xs), max(xs)
    return (low, high) if low < high else (low - 1, high + 1)


def _y_range(drawn: Sequence[Series]) -> tuple[float, float]:
    lows: list[float] = []
    highs: list[float] = []
    for curve in drawn:
        band = curve.band or (0.0,) * len(curve.points)
        lows += [y - width for (_, y), width in zip(curve.points, band, strict=True)]
        highs += [y + width for (_, y), width in zip(curve.points, band, strict=True)]
    low, high = min(lows), max(highs)
    # a range that is nothing but rounding error would magnify it to the height of the chart
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):
        margin = 0.1 * abs(low) or 1.0
    else:
        margin = 0.06 * (high - low)
    return low - margin, high + margin


def _axes(frame: _Frame, look: _Look, x_ticks: list[float], y_ticks: list[float]) -> str:
    parts: list[str] = []
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(_segment("grid", (frame.left, y), (frame.right, y)))
        parts.append(_text(format_number(tick), frame.left - 6, y + 3.5, "tick", anchor="end"))
    for tick in x_ticks:
        x = frame.x(tick)
        parts.append(_segment("axis", (x, frame.bottom), (x, frame.bottom + 4)))
        parts.append(_text(format_number(tick), x, frame.bottom + 16, "tick", anchor="middle"))
    parts.append(_segment("axis", (frame.left, frame.bottom), (frame.right, frame.bottom)))
    if look.title:
        parts.append(_text(look.title, 12, 22, "title"))
    middle = (frame.left + frame.right) / 2
    if look.x_label:
        parts.append(_text(look.x_label, middle, look.height - 8, "label", anchor="middle"))
    if look.y_label:
        middle = (frame.top + frame.bottom) / 2
        turned = f'transform="rotate(-90 16 {middle:.1f})"'
        parts.append(_text(look.y_label, 16, middle, "label", anchor="middle", extra=turned))
    return "".join(parts)


def _legend(curves: Sequence[Series], look: _Look) -> tuple[str, float]:
    """Names with colour swatches in as many rows as they need, and the height of those rows."""
    parts: list[str] = []
    x, row = 12.0, 0
    top = 34.0 if look.title else 10.0
    for index, curve in enumerate(curves):
        name = curve.name
        width = 30 + _CHAR_WIDTH * len(name)
        if x > 12 and x + width > look.width:
            x, row = 12.0, row + 1
        y = top + row * _LEGEND_ROW + 6
        parts.append(_segment(f"line {_colour(curve, index)}", (x, y), (x + 16, y)))
        parts.append(_text(name, x + 21, y + 3.5, "label"))
        x += width + 8
    return "".join(parts), (row + 1) * _LEGEND_ROW if curves else 0.0


def _band(curve: Series, frame: _Frame, index: int) -> str:
    widths = curve.band or ()
    upper = [(x, y + width) for (x, y), width in zip(curve.points, widths, strict=True)]
    lower = [(x, y - width) for (x, y), width in zip(curve.points, widths, strict=True)]
    edge = thin(upper, _MAX_DRAWN_POINTS) + thin(lower, _MAX_DRAWN_POINTS)[::-1]
    return f'<polygon class="band {_colour(curve, index)}" points="{_coordinates(edge, frame)}"/>'


def _line(curve: Series, frame: _Frame, index: int) -> str:
    points = thin(curve.points, _MAX_DRAWN_POINTS)
    return f'<polyline class="line {_colour(curve, index)}" points="{_coordinates(points, frame)}"/>'


def _smoothed(curve: Series, frame: _Frame, index: int) -> str:
    if len(curve.points) < _MIN_SMOOTHED_POINTS:
        return ""
    values = smooth([y for _, y in curve.points], _SMOOTHING)
    points = thin([(x, y) for (x, _), y in zip(curve.points, values, strict=True)], _MAX_DRAWN_POINTS)
    return f'<polyline class="line smooth {_colour(curve, index)}" points="{_coordinates(points, frame)}"/>'


def _marks(curve: Series, frame: _Frame, index: int) -> str:
    """A point with its values for whoever points at it; of a long curve a few, which are seen only then."""
    is_short = len(curve.points) <= _MAX_MARKED_POINTS
    kind = "dot" if is_short else "dot far"
    widths = dict(zip((x for x, _ in curve.points), curve.band or (), strict=False))
    parts: list[str] = []
    for x, y in thin(curve.points, _MAX_MARKED_POINTS):
        width = f" \u00b1 {format_number(widths[x])}" if widths.get(x) else ""
        title = escape(f"{curve.name}, {format_number(x)}: {format_number(y)}{width}")
        where = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{2.4 if is_short else 4.5}"'
        parts.append(
            f'<circle class="{kind} {_colour(curve, index)}" {where}><title>{title}</title></circle>'
        )
    return "".join(parts)


def _colour(curve: Series, index: int) -> str:
    is_dashed = curve.is_dashed
    if curve.colour is None:
        is_dashed = is_dashed or bool((index // _NUM_COLOURS) % 2)
    else:
        index = curve.colour
    return f"c{index % _NUM_COLOURS}{' dashed' if is_dashed else ''}"


def _coordinates(points: Sequence[tuple[float, float]], frame: _Frame) -> str:
    return " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)


def _segment(kind: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    ends = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
    return f'<line class="{kind}" {ends}/>'


def _text(text: str, x: float, y: float, kind: str, *, anchor: str = "start", extra: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}'.rstrip()
    return f'<text class="{kind}" {place}>{escape(text)}</text>'
