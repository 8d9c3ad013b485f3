"""Answers of judges from outside, kept beside an evaluation or run, so that nothing is asked and paid for twice."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from viva.run.files import naming, note_written, parse_line
from viva.run.secrets import redacted

ANSWERS_FILE = "judge_answers.jsonl"


class AnswerFile:
    """Answers by the digest of what was asked, a line each; a line is whole or is not read.

    Several processes may add to it: each line is written at once. Secrets in answers are not written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, dict[str, Any]] | None = None

    def get(self, key: str) -> dict[str, Any] | None:
        """The answer that was kept, if there is one."""
        return self._answers().get(key)

    def put(self, key: str, answer: Mapping[str, Any]) -> None:
        """Keep an answer.

        Raises:
            OSError: If it cannot be written; the error names the file.
        """
        known = self._answers()
        is_new = not self.path.is_file()
        with naming(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                file.seek(0, 2)
                is_torn = False
                if file.tell():
                    file.seek(-1, 2)
                    is_torn = file.read(1) != b"\n"
                line = json.dumps({"key": key, "answer": redacted(answer)})
                file.write(("\n" * is_torn + line + "\n").encode())
        if is_new:
            note_written([self.path])
        known[key] = dict(answer)

    def _answers(self) -> dict[str, dict[str, Any]]:
        if self._known is None:
            self._known = dict(self._read())
        return self._known

    def _read(self) -> list[tuple[str, dict[str, Any]]]:
        found: list[tuple[str, dict[str, Any]]] = []
        if not self.path.is_file():
            return found
        for line in self.path.read_bytes().splitlines():
            try:
                row = parse_line(line)
            except ValueError:
                continue  # torn, when a process was killed while it wrote
            key, answer = row.get("key"), row.get("answer")
            if isinstance(key, str) and isinstance(answer, dict):
                found.append((key, cast("dict[str, Any]", answer)))
        return found
