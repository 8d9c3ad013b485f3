"""Curves over time as one SVG picture, drawn here: no library, no script. Colours come from the style by class."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from viva.view.answers import thin

WIDTH, HEIGHT = 720, 360
MAX_DRAWN_POINTS, MAX_MARKED_POINTS = 800, 60
CHAR_WIDTH = 6.2
LEFT_OF_TICKS, RIGHT, TOP, BOTTOM = 30, WIDTH - 14, 51.0, HEIGHT - 40

STYLE = """\
.chart {
  --paper: #ffffff; --ink: #1d2329; --muted: #5d6874; --rule: #dfe4e9;
  --c0: #0b6bb5; --c1: #c2500a; --c2: #00806a; --c3: #9a3f96;
  font: 11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
@media (prefers-color-scheme: dark) {
  .chart {
    --paper: #14181d; --ink: #e6eaee; --muted: #9aa6b2; --rule: #2c343c;
    --c0: #5cb3f0; --c1: #ff9457; --c2: #41cdb0; --c3: #e08fdc;
  }
}
.chart .paper { fill: var(--paper); }
.chart .grid { stroke: var(--rule); stroke-width: 1; }
.chart .axis { stroke: var(--muted); stroke-width: 1; }
.chart .tick, .chart .label { fill: var(--muted); }
.chart .title { fill: var(--ink); font-size: 14px; font-weight: 600; }
.chart .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.chart .far { opacity: 0; }
.chart .far:hover { opacity: 1; }
.chart .line.c0 { stroke: var(--c0); } .chart .dot.c0 { fill: var(--c0); }
.chart .line.c1 { stroke: var(--c1); } .chart .dot.c1 { fill: var(--c1); }
.chart .line.c2 { stroke: var(--c2); } .chart .dot.c2 { fill: var(--c2); }
.chart .line.c3 { stroke: var(--c3); } .chart .dot.c3 { fill: var(--c3); }
"""

Points = Sequence[tuple[float, float]]


def plot_svg(curves: Mapping[str, Points], *, title: str, x_label: str, y_label: str) -> str:
    """The text of the file, with up to four curves: points by name, of rising x; the y of some must differ."""
    xs, ys = zip(*(point for points in curves.values() for point in points), strict=True)
    margin = 0.06 * (max(ys) - min(ys))
    low, high = min(ys) - margin, max(ys) + margin
    y_ticks = _ticks(low, high, int((HEIGHT - TOP) / 28))
    left = LEFT_OF_TICKS + CHAR_WIDTH * max(len(f"{tick:.4g}") for tick in y_ticks)

    def place(x: float, y: float) -> tuple[float, float]:
        right_of_left = (x - min(xs)) / (max(xs) - min(xs)) * (RIGHT - left)
        return left + right_of_left, BOTTOM - (y - low) / (high - low) * (BOTTOM - TOP)

    parts = [*_legend(curves)]
    for tick in y_ticks:
        _, y = place(xs[0], tick)
        parts += [
            _line("grid", (left, y), (RIGHT, y)),
            _text(f"{tick:.4g}", left - 6, y + 3.5, "tick", "end"),
        ]
    for tick in _ticks(min(xs), max(xs), int(WIDTH / 90)):
        x, _ = place(tick, low)
        parts.append(_line("axis", (x, BOTTOM), (x, BOTTOM + 4)))
        parts.append(_text(f"{tick:.4g}", x, BOTTOM + 16, "tick", "middle"))
    middle = (TOP + BOTTOM) / 2
    turned = f' transform="rotate(-90 16 {middle:.1f})"'
    parts += [
        _line("axis", (left, BOTTOM), (RIGHT, BOTTOM)),
        _text(title, 12, 22, "title", "start"),
        _text(x_label, (left + RIGHT) / 2, HEIGHT - 8, "label", "middle"),
        _text(y_label, 16, middle, "label", "middle", turned),
    ]
    for index, points in enumerate(curves.values()):
        ends = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in thin(points, MAX_DRAWN_POINTS))
        parts.append(f'<polyline class="line c{index}" points="{ends}"/>')
    for index, (name, points) in enumerate(curves.items()):
        for x, y in thin(points, MAX_MARKED_POINTS):  # values for whoever points at them
            told = html.escape(f"{name}, {x:.4g}: {y:.4g}")
            where = 'cx="{:.1f}" cy="{:.1f}" r="4.5"'.format(*place(x, y))
            parts.append(f'<circle class="dot far c{index}" {where}><title>{told}</title></circle>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" aria-label="{html.escape(title)}" '
        f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">\n<style>\n{STYLE}</style>\n'
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="6"/>\n{"".join(parts)}\n</svg>\n'
    )


def _ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Round values inside [low, high] at equal distances of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / (max_ticks - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _legend(names: Iterable[str]) -> Iterable[str]:
    x, y = 12.0, 40.0
    for index, name in enumerate(names):
        yield _line(f"line c{index}", (x, y), (x + 16, y))
        yield _text(name, x + 21, y + 3.5, "label", "start")
        x += 38 + CHAR_WIDTH * len(name)


def _line(kind: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    ends = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
    return f'<line class="{kind}" {ends}/>'


def _text(text: str, x: float, y: float, kind: str, anchor: str, extra: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}'
    return f'<text class="{kind}" {place}>{html.escape(text)}</text>'
