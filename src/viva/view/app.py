"""The page's server: files of the page, and JSON about runs and results of ``viva eval``. It only reads."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from viva import __version__
from viva.view.curves import curve_layout, curve_points
from viva.view.entries import Entry
from viva.view.evaluations import read_evaluations
from viva.view.guard import Guard
from viva.view.judge_summary import judge_by_step, judge_totals, telling
from viva.view.markup import visible
from viva.view.payload import conversation_payload, text_at
from viva.view.queries import MAX_PAGE_SIZE, Query, facets, page_of, parse_query, select
from viva.view.reading import Reading
from viva.view.run_files import transcript_of
from viva.view.run_index import RunIndex
from viva.view.sources import names_of
from viva.view.token_turns import token_payload

__all__ = ["STATIC_TYPES", "make_app"]

STATIC_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
"""Kinds of files that are served, by the ends of their names."""

_MAX_KEYS = 64
_MAX_RUNS = 2
_PAGE_SIZE = 50


class _NotFound(Exception):
    """There is no such run, conversation or file."""


def make_app(folders: Sequence[Path], *, token: str) -> ASGIApp:
    """The application for one or two runs, and any results of ``viva eval``.

    Args:
        folders: Of the runs; result files, and folders of them.
        token: What a request has to know.

    Raises:
        ValueError: If one of them is neither, two are the same, or there are more than two runs.
    """
    runs = [RunIndex(folder) for folder in folders]
    num_runs = sum(run.kind == "run" for run in runs)
    if num_runs > _MAX_RUNS:
        raise ValueError(f"viva view shows one run or two, and any results of viva eval; got {num_runs} runs")
    api = _Api(runs)
    routes = [
        Route("/", _page),
        Route("/static/{name}", _static),
        *(Route(f"/api/{name}", _answering(handler)) for name, handler in api.handlers().items()),
    ]
    return Guard(Starlette(routes=routes), token=token)


def _page(_: Request) -> Response:
    return _file("index.html")


def _static(request: Request) -> Response:
    return _file(request.path_params["name"])


def _file(name: str) -> Response:
    folder = resources.files("viva.view").joinpath("static")
    known = {each.name: each for each in folder.iterdir() if Path(each.name).suffix in STATIC_TYPES}
    if name not in known:
        return PlainTextResponse("There is no such file.\n", 404)
    return Response(known[name].read_bytes(), media_type=STATIC_TYPES[Path(name).suffix])


def _answering(handler: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """A handler whose mistakes become answers that say what was wrong."""

    def endpoint(request: Request) -> Response:
        try:
            status, value = 200, handler(request)
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except _NotFound as error:
            status, text = 404, json.dumps({"error": str(error)})
        except OSError as error:  # a file of the run that is gone, or may not be read any more
            why = f"a file of the run cannot be read: {error.strerror or error}. Is its folder still there?"
            status, text = 410, json.dumps({"error": visible(why)})
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            status, text = 400, json.dumps({"error": visible(f"{type(error).__name__}: {error}")})
        return Response(text.encode("utf-8", "replace"), status, media_type="application/json")

    return endpoint


class _Api:
    """What the page can ask. Requests are answered one at a time, between slices of the reading of files."""

    def __init__(self, runs: Sequence[RunIndex]) -> None:
        self._runs = runs
        self._names = names_of([run.folder for run in runs])
        self._lock = threading.Lock()
        self._reading = Reading(runs, self._lock)

    def handlers(self) -> dict[str, Callable[[Request], Any]]:
        """By the last part of their addresses."""
        locked = (self.curves, self.series, self.conversations, self.text, self.judge, self.evaluations)
        own = (
            self.runs,
            self.conversation,
        )  # these wait for the reading, and take the lock when they have waited
        found: dict[str, Callable[[Request], Any]] = {method.__name__: method for method in own}
        return found | {method.__name__: self._locked(method) for method in locked}

    def _locked(self, method: Callable[[Request], Any]) -> Callable[[Request], Any]:
        def answer(request: Request) -> Any:
            with self._lock:
                return method(request)

        return answer

    def runs(self, _: Request) -> Any:
        """All runs, after a look at what is new in their files."""
        self._reading.go_on()
        with self._lock:
            runs = [
                _run(run, name, is_complete=self._reading.is_complete(run))
                for run, name in zip(self._runs, self._names, strict=True)
            ]
        return {"viva": __version__, "runs": runs}

    def curves(self, _: Request) -> Any:
        """Names of all curves, in groups."""
        return curve_layout({key for run in self._runs for key in run.metrics})

    def series(self, request: Request) -> Any:
        """Points of some curves of all runs."""
        keys = request.query_params.getlist("key")[:_MAX_KEYS]
        return [curve_points(run, keys) for run in self._runs]

    def conversations(self, request: Request) -> Any:
        """One page of the conversations that match."""
        run = self._run(request)
        found = select(run.entries.values(), parse_query(request.query_params))
        page = _whole(request, "page", 0)
        size = min(_whole(request, "size", _PAGE_SIZE), MAX_PAGE_SIZE)
        return {
            "total": len(found),
            "page": page,
            "size": size,
            "rows": [_row(run, entry) for entry in page_of(found, page, size)],
            "facets": facets(run.entries.values()),
        }

    def conversation(self, request: Request) -> Any:
        """One conversation, with its tokens where they were kept, and its neighbours in the list."""
        run, step, group = self._run(request), _whole(request, "step"), _whole(request, "group")
        query = parse_query(request.query_params)
        self._reading.wait_for(run, step, group)
        with self._lock:
            return _conversation(run, step, group, query)

    def text(self, request: Request) -> Any:
        """One whole text."""
        step, group = _whole(request, "step"), _whole(request, "group")
        row = self._run(request).transcript(step, group)
        if row is None:
            raise _NotFound(f"this run has no conversation {group} in step {step}")
        return {"text": text_at(row, request.query_params.get("ref", ""))}

    def judge(self, request: Request) -> Any:
        """Figures about the judge over all conversations that match, by step, and where to look."""
        run = self._run(request)
        found = select(run.entries.values(), parse_query(request.query_params))
        worth_a_look = telling(found)
        page = _whole(request, "page", 0)
        return {
            "totals": asdict(judge_totals(found)),
            "steps": [{"step": step, **asdict(sums)} for step, sums in judge_by_step(found).items()],
            "total": len(worth_a_look),
            "page": page,
            "size": _PAGE_SIZE,
            "rows": [_row(run, entry) for entry in page_of(worth_a_look, page, _PAGE_SIZE)],
        }

    def evaluations(self, _: Request) -> Any:
        """What ``viva eval`` wrote into the runs' folders, and the results that were given themselves."""
        return [
            {"name": name, "results": read_evaluations(run.folder)}
            for run, name in zip(self._runs, self._names, strict=True)
        ]

    def _run(self, request: Request) -> RunIndex:
        index = _whole(request, "run", 0)
        if not 0 <= index < len(self._runs):
            raise _NotFound(f"there is no run {index}")
        return self._runs[index]


def _conversation(run: RunIndex, step: int, group: int, query: Query) -> dict[str, Any]:
    row = run.transcript(step, group)
    if row is None:
        raise _NotFound(f"this run has no conversation {group} in step {step}")
    transcript = transcript_of(f"step {step}, group {group}", row)
    tokens = run.tokens(step, group)
    found = [(entry.step, entry.group) for entry in select(run.entries.values(), query)]
    at = found.index((step, group)) if (step, group) in found else None
    return {
        **conversation_payload(transcript),
        "tokens": None if tokens is None else token_payload(tokens, transcript.record),
        "previous": found[at - 1] if at else None,
        "next": found[at + 1] if at is not None and at + 1 < len(found) else None,
    }


def _whole(request: Request, name: str, default: int | None = None) -> int:
    value = request.query_params.get(name, "" if default is None else str(default))
    if not value.isascii() or not value.isdecimal() or len(value) > 12:
        raise ValueError(f"{name} must be a whole number; got {value[:40]!r}")
    return int(value)


def _row(run: RunIndex, entry: Entry) -> dict[str, Any]:
    return asdict(entry) | {"has_tokens": run.has_tokens(entry.step, entry.group)}


def _run(run: RunIndex, name: str, *, is_complete: bool) -> dict[str, Any]:
    model = run.config.get("model_name")
    return {
        "name": name,
        "kind": run.kind,
        "model": visible(model) if isinstance(model, str) else "",
        "version": run.version,
        "steps": run.num_steps,
        "conversations": len(run.entries),
        "is_complete": is_complete,
        "progress": run.progress,
        "damaged": run.damaged,
        "problems": [visible(problem) for problem in run.problems],
        "config": {
            visible(key): visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for key, value in sorted(run.config.items())
        },
    }
