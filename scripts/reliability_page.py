"""Write the table of ``docs/reliability.md`` from ``findings.jsonl``, which ``make test-reliability`` fills."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "reliability" / "findings.jsonl"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def table(text: str) -> str:
    """Markdown of the recorded lines, in the order of their points."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    rows.sort(key=lambda row: (int(row["recipe"].partition(" ")[0]), row["claim"]))
    lines = ["| point | held, without a failure | trials | seed | seconds |", "|---|---|---|---|---|"]
    for recipe, entries in groupby(rows, key=lambda row: row["recipe"]):
        for entry in entries:
            said = entry["claim"] + (f" ({entry['figures']})" if entry["figures"] else "")
            seed = "all cases" if entry["seed"] is None else entry["seed"]
            cells = (
                recipe,
                said.replace("|", "\\|"),
                f"{entry['trials']:,}",
                seed,
                f"{entry['seconds']:,.0f}",
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table(RESULTS.read_text(encoding="utf-8")) + END + after


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
