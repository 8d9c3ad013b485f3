"""The report: one HTML file that needs nothing beside itself and runs no script."""

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from viva import __version__
from viva.run.files import write_atomic
from viva.run.written import note_written
from viva.view.chart import chart_css
from viva.view.chosen import choose
from viva.view.conversation import conversation_html
from viva.view.credit import credit_html
from viva.view.curve_section import curves_html
from viva.view.entries import Entry
from viva.view.figure_tables import evaluations_html
from viva.view.headline import ACCURACY, ACCURACY_STDERR, headline_html
from viva.view.judge_section import judge_html
from viva.view.markup import data, escape, text_block
from viva.view.run_files import (
    TOKENS_FILE,
    TRANSCRIPTS_FILE,
    Curves,
    Run,
    read_tokens,
    read_transcript,
)
from viva.view.sources import kind_of, names_of, read_source
from viva.view.token_turns import token_payload

__all__ = ["write_report"]

_MAX_VOID_REASONS = 10
_MAX_PROBLEMS = 20


def write_report(
    run_dir: str | Path, output: str | Path | None = None, *, second: str | Path | None = None
) -> Path:
    """Write the report of a run, from the run's own files alone, or of a result of ``viva eval``.

    Reads ``metrics.jsonl``, and ``config.json``, ``transcripts.jsonl``, ``tokens.jsonl`` and ``eval/`` where they
    exist. The same files give the same bytes.

    Args:
        run_dir: The run's folder (its ``log_path``); or a result file, or a folder of results.
        output: File to write; ``report.html`` in the run's folder, or beside the result file, if ``None``.
        second: Another run, laid over the first one: its curves are dashed, all else stands below.

    Returns:
        The file written; it appears whole or not at all.

    Raises:
        ValueError: If the folder is not that of a run, or a file in it is damaged.
    """
    sources = [Path(each) for each in (run_dir, second) if each is not None]
    runs = dict(zip(names_of(sources), map(read_source, sources), strict=False))
    folder = sources[0].parent if sources[0].is_file() else sources[0]
    path = folder / "report.html" if output is None else Path(output)
    write_atomic(path, _page(runs))
    note_written([path])
    return path


def _page(runs: Mapping[str, Run]) -> str:
    style = chart_css() + resources.files("viva.view").joinpath("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    name = escape(" and ".join(runs))
    models = dict.fromkeys(run.config.get("model_name") for run in runs.values())
    subtitle = "".join(f" \u00b7 {escape(model)}" for model in models if isinstance(model, str))
    curves = {name: _other_curves(run) for name, run in runs.items()}
    unreadable: list[str] = []
    places, conversations = _conversations(runs, unreadable)
    parts = [
        _damage(runs, unreadable),
        *_headlines(runs),
        curves_html(curves),
        judge_html({name: run.transcripts for name, run in runs.items()}, places),
        conversations,
        evaluations_html({name: run.folder for name, run in runs.items()}),
        _configuration(runs),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{name}: Viva report</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<header><p class="muted">Viva report{subtitle}</p><h1>{name}</h1>{_contents(parts)}</header>\n<main>\n'
        f"{chr(10).join(parts)}\n</main>\n<footer>{_notes(runs)}</footer>\n</body>\n</html>\n"
    )


def _contents(parts: Sequence[str]) -> str:
    """Links to the sections that there are."""
    titles = {"curves": "Curves", "judge": "Judge", "conversations": "Conversations"}
    titles |= {"evaluations": "Evaluations", "configuration": "Configuration"}
    links = [
        f'<a href="#{name}">{title}</a>'
        for name, title in titles.items()
        if any(part.startswith(f'<section id="{name}"') for part in parts)
    ]
    return f'<nav aria-label="Sections">{" ".join(links)}</nav>'


def _damage(runs: Mapping[str, Run], unreadable: Sequence[str]) -> str:
    """A banner about files that are not as the run wrote them; nothing where all are."""
    found = [*(problem for run in runs.values() for problem in run.damage), *unreadable]
    if not found:
        return ""
    shown = "".join(f"<li>{escape(problem)}</li>" for problem in found[:_MAX_PROBLEMS])
    more = f"<li>and {len(found) - _MAX_PROBLEMS:,} more</li>" if len(found) > _MAX_PROBLEMS else ""
    return (
        '<div class="failure" role="alert"><p><b>Files of the run are damaged: this page may lack something, or show '
        f"what the run did not write.</b></p><ul>{shown}{more}</ul></div>"
    )


def _headlines(runs: Mapping[str, Run]) -> list[str]:
    """Of each run what a reader wants to know first; results have their figures instead."""
    return [
        (f"<h2>{escape(name)}</h2>" if len(runs) > 1 else "") + headline_html(run)
        for name, run in runs.items()
        if kind_of(run.folder) == "run"
    ]


def _other_curves(run: Run) -> Curves:
    """All but the one that the headline shows."""
    return {key: points for key, points in run.curves.items() if key not in (ACCURACY, ACCURACY_STDERR)}


def _conversations(
    runs: Mapping[str, Run], unreadable: list[str]
) -> tuple[dict[tuple[str, int, int], str], str]:
    """Places of the conversations that are shown, by run, step and group; and the section.

    What is left out because it cannot be shown goes to ``unreadable``.
    """
    places: dict[tuple[str, int, int], str] = {}
    parts: list[str] = []
    for number, (name, run) in enumerate(runs.items()):
        own: list[str] = []
        for choice in choose(run.transcripts, with_tokens=frozenset(run.tokens)):
            step, group = choice.entry.step, choice.entry.group
            places[name, step, group] = f"run-{number}-{step}-{group}"
            own.append(_conversation(run, choice.entry, choice.reason, places[name, step, group], unreadable))
        void = _void_reasons(run)
        if own or void:
            parts += [f"<h3>{escape(name)}</h3>" if len(runs) > 1 else "", void, *own]
    told = '<p class="muted">A sample: viva view shows all of them.</p>' if places else ""
    section = f'<section id="conversations"><h2>Conversations</h2>{told}{chr(10).join(parts)}</section>'
    return places, section if parts else ""


def _conversation(run: Run, entry: Entry, reason: str, anchor: str, unreadable: list[str]) -> str:
    where, credit = f"step {entry.step}, group {entry.group}", ""
    transcript = read_transcript(run, entry.offset)
    try:
        row = read_tokens(run, entry.step, entry.group)
        if row is not None:
            credit = credit_html(token_payload(row, transcript.record), f"streams-{anchor}")
    except ValueError as error:
        unreadable.append(f"{TOKENS_FILE}, {where}: {error}")
    try:
        return conversation_html(transcript, reason, credit, anchor=anchor)
    except (ValueError, LookupError, TypeError) as error:
        unreadable.append(f"{TRANSCRIPTS_FILE}, {where}: no such conversation can have been held ({error})")
        return (
            f'<article class="conversation" id="{anchor}"><p>{escape(where)} cannot be shown.</p></article>'
        )


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


def _configuration(runs: Mapping[str, Run]) -> str:
    """The options of all runs side by side; where they differ, they are marked."""
    configs = [run.config for run in runs.values()]
    if not any(configs):
        return ""
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in runs)
    head = f'<thead><tr><th scope="col">option</th>{heads}</tr></thead>' if len(runs) > 1 else ""
    rows: list[str] = []
    for key in sorted({key for config in configs for key in config}):
        shown = [_shown(config[key]) if key in config else "" for config in configs]
        kind = ' class="differs"' if len(set(shown)) > 1 else ""
        cells = "".join(f"<td{kind}>{text_block(text)}</td>" for text in shown)
        rows.append(f'<tr><th scope="row">{escape(key)}</th>{cells}</tr>')
    return (
        '<section id="configuration"><h2>Configuration</h2>'
        '<details class="group"><summary>All options</summary><div class="scroll">'
        f'<table class="config">{head}<tbody>{"".join(rows)}</tbody></table></div></details></section>'
    )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _notes(runs: Mapping[str, Run]) -> str:
    torn = "".join(
        f"<p>The last line of {escape(name)} is torn (the run was stopped while it wrote) and left out.</p>"
        for run in runs.values()
        for name in run.torn
    )
    return f"{torn}<p>Written by Viva {escape(__version__)} from the files of the run.</p>"
