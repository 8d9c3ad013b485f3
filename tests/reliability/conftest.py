"""Two forms of every recipe, and the ledger of what was tried.

``make test`` runs the short form; ``make test-reliability`` (``VIVA_RELIABILITY=full``) the full one, prints the ledger
and writes it to ``findings.jsonl``, from which ``scripts/reliability_page.py`` makes the table of
``docs/reliability.md``.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

FULL = os.environ.get("VIVA_RELIABILITY") == "full"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "reliability" / "findings.jsonl"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What one test has tried without a failure."""

    recipe: str
    """Point of the page, e.g. ``kill and resume``."""
    claim: str
    trials: int
    seed: int | None
    """``None`` where every case was tried, and nothing drawn."""
    figures: str
    """Anything measured on the way, in words."""
    seconds: float
    test: str


_entries: list[Entry] = []
_tests: set[str] = set()
"""Those that were begun."""


@pytest.fixture(scope="session")
def trials():
    """Gives the number of trials of the form that is run: ``trials(short=12, full=300)``."""

    def choose(*, short: int, full: int) -> int:
        return full if FULL else short

    return choose


@pytest.fixture
def ledger(request):
    """Records what a test has tried; called at its end, so that only what held is recorded."""
    began, test = time.monotonic(), request.node.nodeid
    _tests.add(test)

    def record(recipe: str, claim: str, *, trials: int, seed: int | None = None, figures: str = "") -> None:
        seconds = round(time.monotonic() - began, 1)
        _entries.append(
            Entry(
                recipe=recipe,
                claim=claim,
                trials=trials,
                seed=seed,
                figures=figures,
                seconds=seconds,
                test=test,
            )
        )

    return record


def pytest_terminal_summary(terminalreporter):
    if not FULL:
        return
    for entry in _entries:
        terminalreporter.write_line(json.dumps(asdict(entry)))


def merged(known, entries, tests):
    """Recorded rows with those of now: of a test that was begun nothing else stays, also if it failed."""
    now = [asdict(entry) for entry in entries]
    claims = {(row["recipe"], row["claim"]) for row in now}
    others = [
        row for row in known if row.get("test") not in tests and (row["recipe"], row["claim"]) not in claims
    ]
    return sorted([*others, *now], key=lambda row: row["recipe"])


def pytest_sessionfinish():
    """Replace the results of the tests that were begun now; others stay."""
    if not FULL or not _tests:
        return
    known = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in merged(known, _entries, _tests)))
