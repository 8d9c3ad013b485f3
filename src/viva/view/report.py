"""The report: the page of ``viva view`` as one file, with what it would ask the server inside."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path

from viva import __version__
from viva.run.files import note_written, write_atomic
from viva.run.secrets import environment_secrets, map_texts, printable
from viva.view.answers import (
    conversation_answer,
    curve_layout,
    curve_points,
    evaluations_answer,
    judge_answer,
    rows_of,
    run_answer,
)
from viva.view.entries import Query, choose, count_strategies
from viva.view.files import names_of
from viva.view.run_index import RunIndex, read_run
from viva.view.summary import summary_answer

_MAX_JUDGED = 30
"""Conversations with flips or cycles that are listed."""

_MAX_TOKENS = 1500
"""Tokens of one turn; a long reply loses what comes after."""

_IMPORT = re.compile(r'^import (\{[^{}]++\}) from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def write_report(
    run_dir: str | Path, output: str | Path | None = None, *, second: str | Path | None = None
) -> Path:
    """Write the report of a run, from its own files alone, or of a result of ``viva eval``, and return its path.

    The same files give the same bytes. A second run is laid over the first one. The file, by default ``report.html`` in
    the run's folder or beside the result file, appears whole or not at all.

    Raises:
        ValueError: If the folder is not that of a run, or a file in it is damaged.
    """
    sources = [Path(each) for each in (run_dir, second) if each is not None]
    names = names_of(sources)
    answers = _answers([read_run(source) for source in sources], names)
    folder = sources[0].parent if sources[0].is_file() else sources[0]
    path = folder / "report.html" if output is None else Path(output)
    write_atomic(path, _page(f"{' and '.join(names)}: Viva report", answers))
    note_written([path])
    return path


def _answers(runs: Sequence[RunIndex], names: Sequence[str]) -> dict[str, object]:
    """Everything that the page asks, by name; of a run, its number; and of a conversation, its step and group."""
    # loads what plays conversations
    from viva.view.other_rewards import other_rewards, stored_conversations

    keys = sorted({key for run in runs for key in run.metrics})
    answers: dict[str, object] = {
        "curves": curve_layout(keys),
        "series": [curve_points(run, keys) for run in runs],
        "summary": [summary_answer(run) for run in runs],
        "evaluations": evaluations_answer(runs, names),
    }
    shown: list[dict[str, object]] = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        unreadable = _add_conversations(answers, number, run)
        answers[f"judge/{number}"] = judge_answer(run, Query(), 0, _MAX_JUDGED)
        if (stored := stored_conversations(run)).num_used:
            answers[f"rewards/{number}"] = other_rewards(stored)
        own = run_answer(run, name, is_complete=True)
        shown.append(
            own | {"version": "", "progress": 1.0, "problems": [*map(printable, run.problems), *unreadable]}
        )
    return answers | {"runs": {"viva": __version__, "runs": shown}}


def _add_conversations(answers: dict[str, object], number: int, run: RunIndex) -> list[str]:
    """A few telling conversations of a run, in the order in which they are worth reading; what cannot be shown."""
    problems: list[str] = []
    entries = sorted(run.entries.values(), key=lambda entry: (entry.step, entry.group))
    with_tokens = {(entry.step, entry.group) for entry in entries if run.has_tokens(entry.step, entry.group)}
    choices = choose(entries, with_tokens=with_tokens)
    places = [(entry.step, entry.group) for entry, _ in choices]
    for at, ((_, reason), (step, group)) in enumerate(zip(choices, places, strict=True)):
        try:
            found = conversation_answer(run, step, group, Query(), max_tokens=_MAX_TOKENS)
        except (ValueError, LookupError, TypeError) as error:
            problems.append(f"step {step}, group {group} cannot be shown: {error}")
            found = {"error": problems[-1]}
        around = {
            "previous": places[at - 1] if at else None,
            "next": places[at + 1] if at + 1 < len(places) else None,
        }
        answers[f"conversation/{number}/{step}/{group}"] = found | around | {"reason": reason}
    rows = rows_of(run, [entry for entry, _ in choices])
    answers[f"conversations/{number}"] = {
        "total": len(choices),
        "all": len(entries),
        "page": 0,
        "size": max(1, len(choices)),
        "rows": [row | {"reason": reason} for row, (_, reason) in zip(rows, choices, strict=True)],
        "strategies": count_strategies(entries),
    }
    return problems


def embedded_json(value: object) -> str:
    """JSON for a ``<script>`` element, which no text in it can end: every text is without credentials and controls."""
    shown = map_texts(partial(printable, known=environment_secrets()), value)
    text = json.dumps(shown, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _page(title: str, answers: Mapping[str, object]) -> str:
    """The page's files in one, which may load nothing and run nothing else."""
    style, script = _file("view.css") + _file("conversation.css"), _script()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{html.escape(printable(title))}</title>\n<style>{style}</style>\n"
        f'<script type="application/json" id="answers">{embedded_json(answers)}</script>\n'
        f'<script type="module">{script}</script>'
    )
    start, _, rest = _file("index.html").partition("<title>")
    return start + head + rest[rest.index("\n</head>") :]


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _file(name: str) -> str:
    return resources.files("viva.view").joinpath("static", name).read_text(encoding="utf-8")


def _script() -> str:
    """All modules of the page as one, each after those it imports: a function that returns what it exports."""
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        source = _file(f"{name}.js")
        for _, other in _IMPORT.findall(source):
            if other not in parts:
                add(other)
        body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = module_\2;\n", source))
        exported = ", ".join(found for _, found in _EXPORT.findall(source))
        parts[name] = (
            f"const module_{name} = await (async () => {{\n{body}\nreturn {{ {exported} }};\n}})();\n"
        )

    add("app")
    return "\n" + "".join(parts.values())
