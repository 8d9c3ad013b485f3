"""Answers of judges from outside, kept beside an evaluation or run, so that nothing is asked and paid for twice."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from viva.judging.endpoint import EndpointUsage
from viva.run.files import append_lines, naming, note_written, parse_line
from viva.run.secrets import redacted

ANSWERS_FILE = "judge_answers.jsonl"


class AnswerFile:
    """Answers by the digest of what was asked, a line each, without secrets; a torn line is not read.

    Several processes may add to it: each line is written at once. Only the places of the lines are in memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step = 0
        """Step of a run that the next answers are for."""
        self._places: dict[str, tuple[int, int]] | None = None
        """Begin and length of lines by key."""
        self._usage: dict[int, EndpointUsage] = {}
        """By step."""

    def get(self, key: str) -> dict[str, Any] | None:
        """The answer that was kept, if there is one."""
        place = self._known().get(key)
        if place is None:
            return None
        with naming(self.path), self.path.open("rb") as file:
            file.seek(place[0])
            row = _row(file.read(place[1]))
        return None if row is None else row["answer"]

    def put(self, key: str, answer: Mapping[str, object]) -> None:
        """Keep an answer; `OSError`, which names the file, if it cannot be written."""
        known = self._known()
        is_new = not self.path.is_file()
        row = {"key": key, "step": self.step, "answer": redacted(answer)}
        line = json.dumps(row) + "\n"  # in ASCII, so as many bytes as characters
        with naming(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        end = append_lines(self.path, line)
        if is_new:
            note_written([self.path])
        known[key] = (end - len(line), len(line))
        self._count(row)

    def usage(self, through: int | None = None) -> EndpointUsage:
        """Requests and tokens of the answers, each once; of those for the steps up to `through`, if it is given."""
        self._known()
        counted = [each for step, each in self._usage.items() if through is None or step <= through]
        return EndpointUsage(
            requests=sum(each.requests for each in counted),
            prompt_tokens=sum(each.prompt_tokens for each in counted),
            sampled_tokens=sum(each.sampled_tokens for each in counted),
        )

    def _known(self) -> dict[str, tuple[int, int]]:
        if self._places is not None:
            return self._places
        self._places, begin = {}, 0
        if self.path.is_file():
            with naming(self.path), self.path.open("rb") as file:
                for line in file:
                    row = _row(line)
                    if row is not None:
                        self._places[row["key"]] = (begin, len(line))
                        self._count(row)
                    begin += len(line)
        return self._places

    def _count(self, row: Mapping[str, Any]) -> None:
        step, usage = row.get("step"), row["answer"].get("usage")
        told = usage if isinstance(usage, dict) else {}
        own = self._usage.setdefault(step if isinstance(step, int) else 0, EndpointUsage())
        own.requests += 1
        prompt, sampled = (told.get(name) for name in ("prompt_tokens", "completion_tokens"))
        own.prompt_tokens += prompt if isinstance(prompt, int) else 0
        own.sampled_tokens += sampled if isinstance(sampled, int) else 0


def _row(line: bytes) -> dict[str, Any] | None:
    """The content of a line; ``None`` if it was torn when a process was killed, or is none of an answer."""
    try:
        row = parse_line(line)
    except ValueError:
        return None
    is_answer = isinstance(row.get("key"), str) and isinstance(row.get("answer"), dict)
    return row if is_answer else None
