"""Line charts as SVG files for the pages of measurements, drawn here: no library, no script.

Colours come from the style by class (``c0`` to ``c5``; later series take them again, dashed).
"""

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_NUM_COLOURS = 6
_MAX_MARKED_POINTS = 60
_MAX_DRAWN_POINTS = 800
_CHAR_WIDTH = 6.2
_LEGEND_ROW = 17.0

_STYLE = """\
.chart {
  --paper: #ffffff; --ink: #1d2329; --muted: #5d6874; --rule: #dfe4e9;
  --c0: #0b6bb5; --c1: #c2500a; --c2: #00806a; --c3: #9a3f96; --c4: #8f6a00; --c5: #5b6570;
  font: 11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
@media (prefers-color-scheme: dark) {
  .chart {
    --paper: #14181d; --ink: #e6eaee; --muted: #9aa6b2; --rule: #2c343c;
    --c0: #5cb3f0; --c1: #ff9457; --c2: #41cdb0; --c3: #e08fdc; --c4: #e5bd45; --c5: #a9b4bf;
  }
}
.chart .paper { fill: var(--paper); }
.chart .grid { stroke: var(--rule); stroke-width: 1; }
.chart .axis { stroke: var(--muted); stroke-width: 1; }
.chart .tick, .chart .label { fill: var(--muted); }
.chart .title { fill: var(--ink); font-size: 14px; font-weight: 600; }
.chart .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.chart .dashed { stroke-dasharray: 5 4; }
.chart .smooth { display: none; }
.chart .far { opacity: 0; }
.chart .far:hover { opacity: 1; }
.chart .band { opacity: 0.16; stroke: none; }
.chart .line.c0 { stroke: var(--c0); } .chart .band.c0, .chart .dot.c0 { fill: var(--c0); }
.chart .line.c1 { stroke: var(--c1); } .chart .band.c1, .chart .dot.c1 { fill: var(--c1); }
.chart .line.c2 { stroke: var(--c2); } .chart .band.c2, .chart .dot.c2 { fill: var(--c2); }
.chart .line.c3 { stroke: var(--c3); } .chart .band.c3, .chart .dot.c3 { fill: var(--c3); }
.chart .line.c4 { stroke: var(--c4); } .chart .band.c4, .chart .dot.c4 { fill: var(--c4); }
.chart .line.c5 { stroke: var(--c5); } .chart .band.c5, .chart .dot.c5 { fill: var(--c5); }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One named curve.

    Raises:
        ValueError: If the x values do not rise strictly, or the band has another length than the points.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    """(x, y) with strictly rising x; both finite."""
    band: tuple[float, ...] | None = None
    """Half-widths of the interval around each y, in units of y."""

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn."""
        xs = [x for x, _ in self.points]
        if any(left >= right for left, right in itertools.pairwise(xs)):
            raise ValueError(f"series {self.name!r}: x must rise from point to point; got {xs[:20]}")
        if self.band is not None and len(self.band) != len(self.points):
            raise ValueError(
                f"series {self.name!r}: band has {len(self.band)} half-widths for {len(self.points)} points; "
                "give one for each point, or none at all"
            )


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
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" aria-label="{html.escape(title)}" '
        f'width="{size[0]}" height="{size[1]}" viewBox="0 0 {size[0]} {size[1]}">\n'
        f"<style>\n{_STYLE}</style>\n"
        f'<rect class="paper" width="{size[0]}" height="{size[1]}" rx="6"/>\n{body}\n</svg>\n'
    )
    if output is not None:
        Path(output).write_text(text, encoding="utf-8")
    return text


def _ticks(low: float, high: float, max_ticks: int, *, whole: bool = False) -> list[float]:
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
    y_ticks = _ticks(*y_range, max_ticks=max(3, int((look.height - top) / 28)))
    tick_width = max(len(_format_number(tick)) for tick in y_ticks) * _CHAR_WIDTH
    frame = _Frame(
        left=12 + tick_width + (18 if look.y_label else 0),
        right=look.width - 14,
        top=top,
        bottom=look.height - (40 if look.x_label else 24),
        x_range=x_range,
        y_range=y_range,
    )
    x_ticks = _ticks(*x_range, max_ticks=max(3, int(look.width / 90)), whole=_is_whole(drawn))
    parts = [legend, _axes(frame, look, x_ticks, y_ticks)]
    parts += [_band(curve, frame, index) for index, curve in enumerate(drawn) if curve.band is not None]
    parts += [_line(curve, frame, index) for index, curve in enumerate(drawn)]
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
        parts.append(_text(_format_number(tick), frame.left - 6, y + 3.5, "tick", anchor="end"))
    for tick in x_ticks:
        x = frame.x(tick)
        parts.append(_segment("axis", (x, frame.bottom), (x, frame.bottom + 4)))
        parts.append(_text(_format_number(tick), x, frame.bottom + 16, "tick", anchor="middle"))
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
        parts.append(_segment(f"line {_colour(index)}", (x, y), (x + 16, y)))
        parts.append(_text(name, x + 21, y + 3.5, "label"))
        x += width + 8
    return "".join(parts), (row + 1) * _LEGEND_ROW if curves else 0.0


def _band(curve: Series, frame: _Frame, index: int) -> str:
    widths = curve.band or ()
    upper = [(x, y + width) for (x, y), width in zip(curve.points, widths, strict=True)]
    lower = [(x, y - width) for (x, y), width in zip(curve.points, widths, strict=True)]
    edge = _thin(upper, _MAX_DRAWN_POINTS) + _thin(lower, _MAX_DRAWN_POINTS)[::-1]
    return f'<polygon class="band {_colour(index)}" points="{_coordinates(edge, frame)}"/>'


def _line(curve: Series, frame: _Frame, index: int) -> str:
    points = _thin(curve.points, _MAX_DRAWN_POINTS)
    return f'<polyline class="line {_colour(index)}" points="{_coordinates(points, frame)}"/>'


def _marks(curve: Series, frame: _Frame, index: int) -> str:
    """A point with its values for whoever points at it; of a long curve a few, which are seen only then."""
    is_short = len(curve.points) <= _MAX_MARKED_POINTS
    kind = "dot" if is_short else "dot far"
    widths = dict(zip((x for x, _ in curve.points), curve.band or (), strict=False))
    parts: list[str] = []
    for x, y in _thin(curve.points, _MAX_MARKED_POINTS):
        width = f" \u00b1 {_format_number(widths[x])}" if widths.get(x) else ""
        title = html.escape(f"{curve.name}, {_format_number(x)}: {_format_number(y)}{width}")
        where = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{2.4 if is_short else 4.5}"'
        parts.append(f'<circle class="{kind} {_colour(index)}" {where}><title>{title}</title></circle>')
    return "".join(parts)


def _colour(index: int) -> str:
    return f"c{index % _NUM_COLOURS}{' dashed' if (index // _NUM_COLOURS) % 2 else ''}"


def _coordinates(points: Sequence[tuple[float, float]], frame: _Frame) -> str:
    return " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)


def _segment(kind: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    ends = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
    return f'<line class="{kind}" {ends}/>'


def _text(text: str, x: float, y: float, kind: str, *, anchor: str = "start", extra: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}'.rstrip()
    return f'<text class="{kind}" {place}>{html.escape(text)}</text>'


def _thin(points: Sequence[tuple[float, float]], max_points: int) -> list[tuple[float, float]]:
    """At most about ``max_points`` points that keep the curve's outline.

    Of each run of neighbours the first, lowest, highest and last point stay, so no spike disappears.
    """
    if len(points) <= max_points:
        return list(points)
    size = -(-4 * len(points) // max_points)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        run = points[start : start + size]
        lowest = min(run, key=lambda point: point[1])
        highest = max(run, key=lambda point: point[1])
        kept += sorted({run[0], lowest, highest, run[-1]})
    return kept


def _format_number(value: float) -> str:
    """A number for people: four significant digits, no needless zeros."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = 0 if float(value).is_integer() else max(0, 3 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    if abs(value) >= 1e5 and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.3g}"
