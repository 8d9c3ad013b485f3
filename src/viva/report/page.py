"""The report: one HTML file that needs nothing beside itself and runs no script."""

import base64
import hashlib
import json
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

from viva import __version__
from viva.report.chart import chart_css, draw_chart
from viva.report.chosen import choose
from viva.report.conversation import conversation_html
from viva.report.credit import credit_html
from viva.report.curves import Chart, Section, sections
from viva.report.entries import Entry
from viva.report.headline import ACCURACY, ACCURACY_STDERR, headline_html
from viva.report.markup import data, escape, text_block
from viva.report.run_files import Run, read_run, read_tokens, read_transcript
from viva.report.token_turns import token_payload
from viva.rl.files import write_atomic

__all__ = ["write_report"]

_MAX_VOID_REASONS = 10


def write_report(run_dir: str | Path, output: str | Path | None = None) -> Path:
    """Write the report of a run, from the run's own files alone.

    Reads ``metrics.jsonl``, and ``config.json``, ``transcripts.jsonl`` and ``tokens.jsonl`` where they exist. The same
    files give the same bytes.

    Args:
        run_dir: The run's folder (its ``log_path``).
        output: File to write; ``report.html`` in the run's folder if ``None``.

    Returns:
        The file written; it appears whole or not at all.

    Raises:
        ValueError: If the folder is not that of a run, or a file in it is damaged.
    """
    run = read_run(run_dir)
    path = run.folder / "report.html" if output is None else Path(output)
    write_atomic(path, _page(run))
    return path


def _page(run: Run) -> str:
    style = chart_css() + resources.files("viva.report").joinpath("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    name = escape(run.folder.resolve().name)
    model = run.config.get("model_name")
    subtitle = f" \u00b7 {escape(model)}" if isinstance(model, str) else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{name}: Viva report</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<header><p class="muted">Viva report{subtitle}</p><h1>{name}</h1></header>\n<main>\n'
        f"{headline_html(run)}\n{_curves(run)}\n{_conversations(run)}\n{_configuration(run.config)}\n"
        f"</main>\n<footer>{_notes(run)}</footer>\n</body>\n</html>\n"
    )


def _curves(run: Run) -> str:
    shown = {key: points for key, points in run.curves.items() if key not in (ACCURACY, ACCURACY_STDERR)}
    parts = [_section(section) for section in sections(shown)]
    return f'<section id="curves"><h2>Curves</h2>{"".join(parts)}</section>' if parts else ""


def _section(section: Section) -> str:
    figures = "".join(
        f"<figure><figcaption>{escape(chart.title)}</figcaption>{_drawn(section, chart)}</figure>"
        for chart in section.charts
    )
    is_open = " open" if section.is_open else ""
    return (
        f'<details class="group"{is_open}><summary>{escape(section.title)}</summary>'
        f'<div class="charts">{figures}</div>{_numbers(section)}</details>'
    )


def _drawn(section: Section, chart: Chart) -> str:
    return draw_chart(chart.series, label=f"{section.title}: {chart.title}")


def _numbers(section: Section) -> str:
    """First, last, lowest and highest value of every curve of a section."""
    rows: list[str] = []
    for chart in section.charts:
        for key, series in zip(chart.keys, chart.series, strict=True):
            values = [y for _, y in series.points]
            cells = "".join(f"<td>{data(v)}</td>" for v in (values[0], values[-1], min(values), max(values)))
            rows.append(f'<tr><th scope="row">{escape(key)}</th><td>{len(values)}</td>{cells}</tr>')
    heads = "".join(
        f'<th scope="col">{head}</th>' for head in ("points", "first", "last", "lowest", "highest")
    )
    table = f'<tr><th scope="col">metric</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody>'
    return (
        '<details class="numbers"><summary>Numbers</summary>'
        f'<div class="scroll"><table><thead>{table}</table></div></details>'
    )


def _conversations(run: Run) -> str:
    articles = "\n".join(
        _conversation(run, choice.entry, choice.reason)
        for choice in choose(run.transcripts, with_tokens=frozenset(run.tokens))
    )
    parts = _void_reasons(run) + articles
    return f'<section id="conversations"><h2>Conversations</h2>{parts}</section>' if parts else ""


def _conversation(run: Run, entry: Entry, reason: str) -> str:
    transcript = read_transcript(run, entry.offset)
    row = read_tokens(run, entry.step, entry.group)
    credit = ""
    if row is not None:
        credit = credit_html(token_payload(row, transcript.record), f"streams-{entry.step}-{entry.group}")
    return conversation_html(transcript, reason, credit)


def _void_reasons(run: Run) -> str:
    """Why conversations were void, the most frequent reason first."""
    counts = Counter(entry.void_reason or "no reason recorded" for entry in run.transcripts if entry.is_void)
    rows = "".join(
        f"<tr><td>{data(count)}</td><td>{text_block(reason)}</td></tr>"
        for reason, count in counts.most_common(_MAX_VOID_REASONS)
    )
    if not rows:
        return ""
    return (
        '<div class="scroll"><table class="void"><thead><tr><th scope="col">void</th>'
        f'<th scope="col">reason</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _configuration(config: dict[str, Any]) -> str:
    if not config:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td>{text_block(_shown(value))}</td></tr>'
        for key, value in sorted(config.items())
    )
    return (
        '<section id="configuration"><h2>Configuration</h2>'
        '<details class="group"><summary>All options</summary><div class="scroll">'
        f'<table class="config"><tbody>{rows}</tbody></table></div></details></section>'
    )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _notes(run: Run) -> str:
    torn = "".join(
        f"<p>The last line of {escape(name)} is torn (the run was stopped while it wrote) and left out.</p>"
        for name in run.torn
    )
    return f"{torn}<p>Written by Viva {escape(__version__)} from the files of the run.</p>"
