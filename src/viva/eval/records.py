"""Answers of an evaluation by problem, and what it cost, written to JSON and read back, for `viva.eval.figures`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from viva.judging.answers import AnswerCheck
from viva.judging.reasoning_gym import plain_answer
from viva.judging.usage import Meter, metering
from viva.run.files import note_written, write_atomic
from viva.run.secrets import redacted


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """Tokens; with the same command they are the same again."""

    sampled_tokens: int
    """Sampled by all models that were asked."""
    total_tokens: int
    """Read and sampled, every prompt in full."""


@dataclass(kw_only=True)
class Costs:
    """Costs of an evaluation's parts, by name."""

    tokens: dict[str, TokenCost] = field(default_factory=dict[str, TokenCost])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Printed, and kept in no file: they depend on the clock."""

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Count what is done meanwhile."""
        meter, started = Meter(), time.monotonic()
        with metering(meter):
            yield
        used = meter.total
        self.tokens[name] = TokenCost(sampled_tokens=used.sampled_tokens, total_tokens=used.total)
        self.seconds[name] = time.monotonic() - started

    def seconds_text(self) -> str:
        """One line."""
        return f"seconds: {', '.join(f'{name} {seconds:.1f}' for name, seconds in self.seconds.items())}"


def cost_lines(costs: Mapping[str, TokenCost]) -> list[str]:
    """One line of all parts, or none."""
    parts = [
        f"{name} {cost.sampled_tokens:,} tokens sampled, {cost.total_tokens:,} read and sampled"
        for name, cost in costs.items()
    ]
    return [f"cost: {'; '.join(parts)}"] if parts else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer to one problem."""

    right: bool
    """Finished, readable and accepted by the check."""
    vote: str | None
    """Its content, for majorities; ``None`` if it is cut off or empty."""
    finished: bool
    """The policy ended it."""
    num_tokens: int
    text: str


WRONG = Answer(right=False, vote=None, finished=False, num_tokens=0, text="")
"""The answer that was not given."""


def with_votes(answers: Sequence[Answer], check: AnswerCheck) -> tuple[Answer, ...]:
    """The answers to one problem; those that are equal, such as ``x/2`` and ``0.5x``, have the same vote."""
    voters = [place for place, answer in enumerate(answers) if answer.vote is not None]
    votes = dict(zip(voters, check.votes([answers[place].text for place in voters]), strict=True))
    return tuple(replace(answer, vote=votes.get(place)) for place, answer in enumerate(answers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One problem that was asked directly."""

    question: str
    answer: str | None
    """The known answer; ``None``: there is none, so no answer counts as right."""
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAnswers:
    """The first and the last answer of one agent of a conversation."""

    first: Answer
    final: Answer
    score: float | None
    """The conversation's own score of the final answer; ``None`` if the agent failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedProblem:
    """One problem that was talked about."""

    question: str
    answer: str
    agents: tuple[AgentAnswers, ...]
    """With those that failed, and all of a void conversation, as wrong."""
    num_tokens: int
    """All that were sampled: every reply of every agent, of discarded attempts, and of the judge."""
    num_judge_tokens: int
    void_reason: str | None = None
    direct: tuple[Answer, ...] = ()
    """At least one direct answer to the same problem, together within as many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number with its interval."""

    value: float | None
    """``None`` if there is nothing to compute it from."""
    low: float | None
    """Lower end of the 95 % interval; ``None`` where resampling says nothing, see `viva.eval.estimates`."""
    high: float | None
    num_problems: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A figure of two evaluations of the same problems, ``value`` less ``against``."""

    value: float | None
    against: float | None
    difference: float | None
    low: float | None
    """Lower end of the 95 % interval of the difference, from paired draws."""
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All results about one policy."""

    target: dict[str, Any]
    """The policy's name, kind, model, checkpoint and next_step."""
    options: dict[str, Any]
    """All that decides what is sampled and how it is graded."""
    prompts_digest: str
    """Digest of the problems, see `viva.training.data.prompts_digest`."""
    problems: str = ""
    """The number of problems, and their origin; empty in files of earlier versions."""
    asked: tuple[Asked, ...] = ()
    greedy: tuple[Asked, ...] = ()
    """The same problems, asked once at temperature 0."""
    played: dict[str, tuple[PlayedProblem, ...]]
    """By kind of conversation."""
    metrics: dict[str, dict[str, float]]
    """By kind, the training loop's metrics under ``test/`` of the same samples."""
    figures: dict[str, Figure]
    cost: dict[str, TokenCost] = field(default_factory=dict[str, TokenCost])
    """By kind; direct answers at equal tokens under ``<kind>/equal_tokens``. Empty in files of earlier versions."""


FORMAT = "viva evaluation 1"
"""First key of the file, so that a reader knows what it has."""
COMPARISON_FORMAT = "viva comparison 1"

_EVALUATION: TypeAdapter[Evaluation] = TypeAdapter(Evaluation)


def write_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Write an evaluation, to be read back by `read_evaluation`."""
    write_json(path, {"format": FORMAT, **asdict(evaluation)})


def write_comparison(
    path: Path,
    evaluation: Evaluation,
    against: Evaluation,
    figures: Mapping[str, Difference | Figure],
    judges: Sequence[Mapping[str, object]] = (),
) -> None:
    """Write what two evaluations differ in, and how judges compare their answers."""
    content = {
        "format": COMPARISON_FORMAT,
        "first": evaluation.target,
        "second": against.target,
        "options": evaluation.options,
        "prompts_digest": evaluation.prompts_digest,
        **({"judges": list(judges)} if judges else {}),
        "figures": {name: asdict(each) for name, each in figures.items()},
    }
    write_json(path, content)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a file without credentials, and note that it was written."""
    text = json.dumps(redacted(content), ensure_ascii=False, allow_nan=False, indent=1)
    # halves of surrogate pairs, which a model's reply may hold, have no UTF-8
    write_atomic(path, text.encode("utf-8", "replace").decode("utf-8") + "\n")
    note_written([path])


def write_transcripts(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write conversations in the form of a run's ``transcripts.jsonl``."""
    lines = [json.dumps(redacted(row), ensure_ascii=False, allow_nan=False) for row in rows]
    text = "".join(f"{line}\n" for line in lines)
    write_atomic(path, text.encode("utf-8", "backslashreplace").decode("utf-8"))
    note_written([path])


def read_evaluation(path: Path) -> Evaluation:
    """Read an evaluation; a `ValueError` if the file is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; evaluate anew") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not an evaluation; give a file that `viva eval` wrote ({FORMAT!r})")
    try:
        return _EVALUATION.validate_python(content, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path} is damaged: {place}: {first['msg']}") from error


def is_lenient(answer: Answer, known: str | None) -> bool:
    """Whether a reply is right, or names the known answer, wherever it stands and however the reply ends."""
    return answer.right or is_named(answer.text, known)


def is_named(text: str, answer: str | None) -> bool:
    """Whether a known answer stands in a text by itself, in any place; letter case counts for a lone letter only."""
    wanted = " ".join(plain_answer(answer or "").split()).rpartition("####")[2].strip()
    if not wanted:
        return False
    whole = " ".join(text.split())
    if len(wanted) > 1:  # "a" is an article, "A" a choice
        wanted, whole = wanted.casefold(), whole.casefold()
    # no part of a longer word or number: [^\W_] is a letter or a digit
    return re.search(rf"(?<![^\W_]|[.-]){re.escape(wanted)}(?![^\W_]|[.,]\d)", whole) is not None
