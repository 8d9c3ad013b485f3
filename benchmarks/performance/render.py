"""From recorded measurements to ``benchmarks/performance/README.md``."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rows import ROWS, Figure, Ratio, Row

Record = Mapping[str, Any]
Line = tuple[str, str, str, str, str]
"""What, measured, spread, aim, whether it is reached."""

HEAD = """\
# Performance

Measured by `make bench` (`python benchmarks/performance/run.py rows=...` for single rows), written by its renderer;
do not edit. Every ratio is taken within one run: the sides are processes that take turns on the same machine, after
a step each to warm up (compilation included). A ratio is the median of the repeats' own ratios, the range goes from
the least to the greatest of them. Above 1 means that the first one named costs more. The model is a random Llama of
42 M parameters unless another size is named, with LoRA 16; prompts are random too. Peers run in environments of their
own. What falls short stays in the table.
"""


def newest(text: str) -> dict[str, Record]:
    """The last record of each row, in the order of the table.

    Args:
        text: JSON lines.
    """
    records = {record["row"]: record for record in map(json.loads, text.splitlines())}
    return {name: records[name] for name in ROWS if name in records}


def render(records: Mapping[str, Record]) -> str:
    """The whole page."""
    parts = [HEAD, _summary(records), *map(_machine_lines, _machines(records.values()))]
    for name, record in records.items():
        parts.append(_section(name, ROWS[name], record))
    missing = [name for name in ROWS if name not in records]
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.\n")
    return "\n".join(parts)


def _summary(records: Mapping[str, Record]) -> str:
    """Everything that has an aim, in one table."""
    lines = ["| work | | measured | aim | reached |", "|---|---|---|---|---|"]
    for name, record in records.items():
        for title, measured, _, aim, reached in lines_of(ROWS[name], record):
            if aim:
                lines.append(f"| {ROWS[name].work} | {title} | {measured} | {aim} | {reached} |")
    return "\n".join([*lines, ""])


def _section(name: str, row: Row, record: Record) -> str:
    table = [f"| {' | '.join(line)} |" for line in lines_of(row, record)]
    costs = [f"- {label}: {_cost(row, side)}" for label, side in record["sides"].items()]
    notes = [f"- {note}" for note in row.notes]
    title = (
        row.work
        if row.model == "42m"
        else f"{row.work}, {'SmolLM2-135M' if row.model == 'smollm2' else 'model of ' + row.model.upper()}"
    )
    return "\n".join(
        [
            f"## {title[0].upper()}{title[1:]}",
            "",
            "| | measured | range | aim | reached |",
            "|---|---|---|---|---|",
            *table,
            "",
            *costs,
            *notes,
            "",
            f"`rows={name}`, {record['repeats']} repeats, machine {record['machine_id']}",
            "",
        ]
    )


def lines_of(row: Row, record: Record) -> list[Line]:
    """The table of one row."""
    sides = record["sides"]
    return [
        *(_line(_pair(each), each, _ratios(each, sides), "x") for each in row.ratios),
        *(
            _line(_title(row, each), each, [values[each.name] for values in _values(sides, each.side)], "")
            for each in row.figures
        ),
    ]


def _title(row: Row, figure: Figure) -> str:
    return (
        f"{figure.side}: {figure.title}"
        if len(row.sides) > 1 and figure.side not in figure.title
        else figure.title
    )


def _values(sides: Mapping[str, Any], label: str) -> Sequence[Mapping[str, float]]:
    return sides.get(label, {}).get("values", [])


def _ratios(ratio: Ratio, sides: Mapping[str, Any]) -> list[float]:
    pairs = zip(_values(sides, ratio.over), _values(sides, ratio.under), strict=False)
    return [over[ratio.name] / under[ratio.name] for over, under in pairs]


def _pair(ratio: Ratio) -> str:
    which = "" if ratio.name == "cost" else f", {ratio.name}"
    return f"{ratio.over} / {ratio.under}{which}"


def _line(title: str, spec: Ratio | Figure, found: Sequence[float], unit: str) -> Line:
    bound = "at most" if spec.at_most else "at least"
    aim = "" if spec.aim is None else f"{bound} {spec.aim:g}{unit}"
    if not found:
        return (title, "not measured", "", aim, "")
    value = max(found) if isinstance(spec, Figure) and spec.largest else statistics.median(found)
    reached = spec.aim is None or (value <= spec.aim if spec.at_most else value >= spec.aim)
    verdict = "" if spec.aim is None else "yes" if reached else "**no**"
    return (title, f"{number(value)}{unit}", f"{number(min(found))} to {number(max(found))}", aim, verdict)


def _cost(row: Row, side: Mapping[str, Any]) -> str:
    if "error" in side:
        return f"could not be measured: {side['error']}"
    values = side["values"]
    names = dict.fromkeys(ratio.name for ratio in row.ratios)
    if not values or not all(name in values[0] for name in names or ("cost",)):
        return "see the table"

    def median(name: str) -> str:
        return number(statistics.median(each[name] for each in values))

    parts = [
        f"{'' if name == 'cost' else name + ': '}{median(name)} {row.unit}" for name in names or ("cost",)
    ]
    parts += [f"{name} {median(name)} s" for name in ("rollouts", "update") if name in values[0]]
    parts += [f"peak {median('peak_gb')} GiB"] if "peak_gb" in values[0] else []
    return ", ".join(parts)


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def _machines(records: Iterable[Record]) -> list[tuple[str, Any, dict[str, str]]]:
    """Machines by their id, with the versions of all sides that were measured on them."""
    machines: dict[str, tuple[Any, dict[str, str]]] = {}
    for record in records:
        _, versions = machines.setdefault(record["machine_id"], (record["machine"], {}))
        for label, side in record["sides"].items():
            names = " ".join(f"{name} {version}" for name, version in side.get("versions", {}).items())
            if names:
                versions.setdefault(names, label)
    return [(name, *rest) for name, rest in sorted(machines.items())]


def _machine_lines(entry: tuple[str, Any, dict[str, str]]) -> str:
    name, machine, versions = entry
    flags = ", ".join(machine["flags"]) or "no vector extensions of note"
    lines = [
        f"Machine {name}: {machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, {flags}, "
        f"{machine['memory_gb']} GB, {machine['system']}, Python {machine['python']}. No GPU was used. Versions:",
        "",
        *(f"- {names}" for names in versions),
        "",
    ]
    return "\n".join(lines)
