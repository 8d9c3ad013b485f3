"""Screening a model for a task before a run is paid for: what it answers, and how it judges pairs of its answers.

Legend: ``_P`` problems, ``_N`` answers to one problem.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from viva.conversation.coordinator import gather_or_cancel
from viva.eval.critics import Criticised
from viva.eval.direct import DirectSampler
from viva.eval.records import Answer, Cost, Figure, Played, is_lenient
from viva.judging.answers import AnswerCheck, extract_answer, marked_answer
from viva.judging.comparison import Comparison, Judge
from viva.judging.judge import SamplingClient
from viva.run.files import note_written, write_atomic
from viva.run.secrets import redacted
from viva.training.console import Begin, StepProgress, unseen
from viva.training.data import PromptItem, derive_seed

FORMAT = "viva screen 1"
"""First key of the file."""
_SHORT_REPLY = 5
"""Words up to which a reply without mark or number is taken to be an answer as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One answer, drawn as in training."""

    answer: Answer
    logprob: float
    """Log-probability of the whole reply under the sampler, in nats."""
    has_answer: bool
    """Finished, and an answer can be read out of it."""
    is_lenient: bool
    """It is right, or the known answer stands somewhere in the reply, finished or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Two answers to one problem, compared in both orders."""

    first: int
    """Number of the answer that is shown first in the first comparison; the right one where answers are known."""
    second: int
    both: tuple[Comparison, Comparison]


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """One problem with all answers to it."""

    question: str
    answer: str | None
    greedy: Try
    """At temperature 0."""
    tries_N: tuple[Try, ...]
    judged: Judged | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Advice about a reward, or about how to sample."""

    about: str
    """A reward's name, or what an option is about."""
    verdict: str
    """``works``, ``fails``, ``unclear`` for rewards; ``note`` for anything else."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Screening:
    """All that was found out about a model and a task."""

    target: dict[str, Any]
    """The policy's name, kind, model, checkpoint and next_step."""
    task: str
    """Number of problems, and their origin."""
    options: dict[str, Any]
    """All that decides what is sampled and how it is graded."""
    prompts_digest: str
    has_answers: bool
    """Whether answers are known."""
    problems: tuple[Screened, ...]
    played: dict[str, tuple[Played, ...]]
    """Conversations about the first problems, by kind."""
    critics: tuple[Criticised, ...]
    """Critiques and votes in those of critique self-play, and the judge on the same pairs."""
    cost: dict[str, Cost]
    """Costs by part: answers, judged pairs, every kind of conversation, the critics' pairs."""
    figures: dict[str, Figure]
    advice: tuple[Advice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Screener:
    """Asks problems at temperature 0 and at that of training, and has pairs of answers judged."""

    direct: DirectSampler
    """At the temperature of training."""
    num_samples: int
    judge: Judge
    num_pairs: int
    """Problems of which a pair is judged, at most."""

    async def ask(
        self, sampler: SamplingClient, items: Sequence[PromptItem], begin: Begin = unseen
    ) -> tuple[Screened, ...]:
        """All answers, without judgements."""
        greedy = self.direct.at(0.0)
        progress = begin("answers", len(items) * (self.num_samples + 1), "answers")

        async def ask(index: int, item: PromptItem) -> Screened:
            tries = [
                self._try(self.direct, sampler, index, item, n, progress) for n in range(self.num_samples)
            ]
            first, *others = await gather_or_cancel(
                [self._try(greedy, sampler, index, item, 0, progress), *tries]
            )
            return Screened(question=item.question, answer=item.answer, greedy=first, tries_N=tuple(others))

        return tuple(await gather_or_cancel(ask(index, item) for index, item in enumerate(items)))

    async def _try(
        self,
        direct: DirectSampler,
        sampler: SamplingClient,
        index: int,
        item: PromptItem,
        number: int,
        progress: StepProgress,
    ) -> Try:
        answer, logprobs = await direct.sample(sampler, index, item, number)
        progress.on_reply(answer.num_tokens)
        progress.on_group(answer)
        return Try(
            answer=answer,
            logprob=math.fsum(logprobs),
            has_answer=answer.vote is not None and is_readable(answer.text, direct.check),
            is_lenient=is_lenient(answer, item.answer),
        )

    async def have_judged(
        self, problems_P: Sequence[Screened], seed: int, begin: Begin = unseen
    ) -> tuple[Screened, ...]:
        """The problems with a pair of answers judged in both orders, where there are two that differ."""
        pairs = {place: pair for place, each in enumerate(problems_P) if (pair := pair_of(each)) is not None}
        chosen = dict(list(pairs.items())[: self.num_pairs])
        progress = begin("judged pairs", len(chosen), "pairs")

        async def judge(place: int, first: int, second: int) -> Judged:
            problem = problems_P[place]
            texts = {number: problem.tries_N[number].answer.text for number in (first, second)}
            both = await gather_or_cancel(
                self.judge.compare(problem.question, texts, *order, derive_seed(seed, "judge", place))
                for order in ((first, second), (second, first))
            )
            progress.on_group(both)
            return Judged(first=first, second=second, both=(both[0], both[1]))

        judged = await gather_or_cancel(judge(place, *pair) for place, pair in chosen.items())
        by_place = dict(zip(chosen, judged, strict=True))
        return tuple(replace(each, judged=by_place.get(place)) for place, each in enumerate(problems_P))


def pair_of(problem: Screened) -> tuple[int, int] | None:
    """The first right and the first wrong answer, or, where none is known, the first two that differ, if there are."""
    have = [(number, each.answer) for number, each in enumerate(problem.tries_N) if each.has_answer]
    if problem.answer is None:
        others = [number for number, answer in have if answer.vote != have[0][1].vote]
        return (have[0][0], others[0]) if others else None
    right = [number for number, answer in have if answer.right]
    wrong = [number for number, answer in have if not answer.right]
    return (right[0], wrong[0]) if right and wrong else None


def is_readable(text: str, check: AnswerCheck) -> bool:
    """Whether an answer stands out of a finished reply: it is marked, a number or a letter, or the reply is short."""
    if check.name == "choice" or marked_answer(text) is not None:
        return check.vote(text) is not None
    answer = extract_answer(text)
    return answer is not None and (answer != text.strip() or len(text.split()) <= _SHORT_REPLY)


def write_screening(path: Path, screening: Screening) -> None:
    """Write all of it as JSON."""
    content = redacted({"format": FORMAT, **asdict(screening)})
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1)
    # halves of surrogate pairs, which a model's reply may hold, have no UTF-8
    write_atomic(path, text.encode("utf-8", "replace").decode("utf-8") + "\n")
    note_written([path])
