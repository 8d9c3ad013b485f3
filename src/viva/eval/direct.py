"""Direct answers to the bare question: once at temperature 0, and once or more as sampled.

A gain at temperature 1 alone may be sharpening, so both are measured on the same questions, with the majority of
several answers beside them, each strictly and, form apart, leniently (`viva.eval.records`).

Equal tokens: a conversation costs many replies, so it is compared with as many direct answers as fit into the tokens
that it took on the same problem, the judge's included. Their number depends on the problem's own answers only.
"""

import asyncio
import math
import statistics
from bisect import bisect_right
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate

import tinker
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.renderers.base import Renderer

from viva.conversation.coordinator import gather_or_cancel, is_interrupted
from viva.conversation.rendering import build_prompt, direct_messages, read_reply
from viva.eval.figures import ladder_figures
from viva.eval.records import (
    WRONG,
    Answer,
    Asked,
    Costs,
    PlayedProblem,
    TokenCost,
    is_lenient,
    with_votes,
)
from viva.judging.answers import CHECKS, AnswerCheck
from viva.judging.judge import SamplingClient
from viva.judging.usage import count_tokens
from viva.training.console import Begin, StepProgress, unseen
from viva.training.data import PromptItem
from viva.training.sampling import PromptTooLongError, Sampling, SeededCompleter

_MOST_DIRECT_ANSWERS = 1024
"""Per problem, at equal tokens: a bound for replies of a token or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectSampler:
    """Asks bare questions; their seeds do not depend on the policy, so changes come from the weights."""

    renderer: Renderer
    sampling: Sampling
    system_prompt: str | None = None
    check: AnswerCheck = CHECKS["math"]

    def at(self, temperature: float) -> "DirectSampler":
        """The same at another temperature."""
        return replace(self, sampling=replace(self.sampling, temperature=temperature))

    async def sample(
        self, sampler: SamplingClient, index: int, item: PromptItem, number: int
    ) -> tuple[Answer, Sequence[float]]:
        """One answer, graded, and the sampling logprobs of its tokens in nats.

        A reply that is cut off, unreadable or not given (the question does not fit) is wrong. The seed comes from the
        question's place in the test set and the answer's number. A call that fails is made again, with another seed,
        up to ``max_retries`` times; what it raises then passes through.
        """
        place = (index, number) if number else (index,)
        completer = SeededCompleter(sampler=sampler, sampling=self.sampling.seeded("direct", *place))
        prompt = build_prompt(self.renderer, direct_messages(item.question, self.system_prompt))
        try:
            reply = await self._reply(completer, prompt)
        except PromptTooLongError:
            return WRONG, ()
        count_tokens("policy", prompt=prompt.length, sampled=len(reply.tokens))
        text, is_clean = read_reply(self.renderer, reply.tokens)
        is_finished = is_clean and reply.stop_reason == "stop"
        answer = Answer(
            right=is_finished and item.answer is not None and self.check.is_right(text, item.answer),
            vote=self.check.vote(text) if is_finished else None,
            finished=is_finished,
            num_tokens=len(reply.tokens),
            text=text,
        )
        return answer, reply.logprobs

    async def _reply(self, completer: SeededCompleter, prompt: tinker.ModelInput) -> TokensWithLogprobs:
        stop = self.renderer.get_stop_sequences()
        for _ in range(self.sampling.max_retries):
            with suppress(tinker.TinkerError, OSError):  # timeouts and lost connections are of the latter
                return await _answered(completer(prompt, stop))
        return await _answered(completer(prompt, stop))


async def _answered(call: Awaitable[TokensWithLogprobs]) -> TokensWithLogprobs:
    """The reply; a call that the engine cancels is a lost connection."""
    try:
        return await call
    except asyncio.CancelledError as error:
        if is_interrupted():
            raise
        raise ConnectionAbortedError(f"the engine cancelled a call: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectEvaluator:
    """Accuracy on questions with known answers, all of which are in the denominator; see `DirectSampler`."""

    items: Sequence[PromptItem]
    direct: DirectSampler
    num_samples: int = 1
    """Answers to each as sampled; the first is that of ``test/direct_accuracy``. At temperature 0 there is one."""
    asks_greedy: bool = False
    """Whether each is also asked at temperature 0."""

    def __post_init__(self) -> None:
        """Reject a test set that is empty or has a question without a known answer."""
        missing = sum(item.answer is None for item in self.items)
        if not self.items or missing:
            raise ValueError(
                f"direct accuracy needs questions with answers; got {len(self.items)}, {missing} without answer"
            )

    async def __call__(
        self, sampler: SamplingClient, step: int, begin: Begin = unseen
    ) -> Mapping[str, float]:
        """Ask all questions; metrics ``test/direct_*``, see `DirectAnswers.metrics`."""
        return (await self.measure(sampler, begin)).metrics()

    async def measure(self, sampler: SamplingClient, begin: Begin = unseen) -> "DirectAnswers":
        """All answers: those as sampled first, so that asking at temperature 0 does not change them."""
        costs = Costs()
        with costs.part("direct"):
            is_greedy = self.direct.sampling.temperature == 0
            count = 1 if is_greedy else self.num_samples
            asked = await ask_all(sampler, self.direct, self.items, count, begin)
            greedy: tuple[Asked, ...] = ()
            if is_greedy:
                greedy = asked
            elif self.asks_greedy:
                greedy = await ask_all(sampler, self.direct.at(0.0), self.items, 1, begin, "at temperature 0")
        return DirectAnswers(asked=asked, greedy=greedy, cost=costs.tokens["direct"])


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectAnswers:
    """The answers to all questions."""

    asked: tuple[Asked, ...]
    """As sampled."""
    greedy: tuple[Asked, ...]
    """One to each at temperature 0; none if nobody asked."""
    cost: TokenCost

    def metrics(self) -> dict[str, float]:
        """The metrics ``test/direct_*``: of the first answers, of the greedy ones, of all, and the cost."""
        firsts = [each.answers[0] for each in self.asked]
        metrics = _accuracies("test/direct_accuracy", self.asked, 1) | {
            "test/direct_questions": len(firsts),
            "test/direct_finish_rate": sum(answer.finished for answer in firsts) / len(firsts),
            "test/direct_reply_tokens": sum(answer.num_tokens for answer in firsts) / len(firsts),
        }
        if self.greedy:
            metrics |= _accuracies("test/direct_accuracy_greedy", self.greedy, 1)
        n = len(self.asked[0].answers)
        if n > 1:
            metrics |= _accuracies(f"test/direct_avg@{n}", self.asked, n)
            for name, terms in ladder_figures(self.asked).items():
                metrics[f"test/direct_{name}"] = math.fsum(value for value, _ in terms) / len(terms)
        metrics["test/direct_sampled_tokens"] = self.cost.sampled_tokens
        metrics["test/direct_total_tokens"] = self.cost.total_tokens
        return metrics


def _accuracies(name: str, asked: Sequence[Asked], n: int) -> dict[str, float]:
    """Accuracy of the first n answers to every question, its standard error over questions, and lenient accuracy."""
    shares = [sum(answer.right for answer in each.answers[:n]) / n for each in asked]
    count = len(shares)
    accuracy = sum(shares) / count
    spread = accuracy * (1 - accuracy) if n == 1 else statistics.pvariance(shares)
    named = sum(is_lenient(answer, each.answer or "") for each in asked for answer in each.answers[:n])
    return {
        name: accuracy,
        f"{name}_stderr": math.sqrt(spread / count),
        f"{name}_lenient": named / (n * count),
    }


async def ask_all(
    sampler: SamplingClient,
    direct: DirectSampler,
    items: Sequence[PromptItem],
    num_samples: int,
    begin: Begin = unseen,
    title: str = "test questions",
) -> tuple[Asked, ...]:
    """Ask every question a number of times, all at once."""
    progress = begin(title, len(items) * num_samples, "answers" if num_samples > 1 else "questions")
    asked = await gather_or_cancel(
        _ask(sampler, direct, index, item, range(num_samples), progress) for index, item in enumerate(items)
    )
    return tuple(
        Asked(question=item.question, answer=item.answer, answers=with_votes(answers, direct.check))
        for item, answers in zip(items, asked, strict=True)
    )


async def match_tokens(
    sampler: SamplingClient,
    direct: DirectSampler,
    played: Sequence[PlayedProblem],
    asked: Sequence[Asked] = (),
    begin: Begin = unseen,
) -> tuple[PlayedProblem, ...]:
    """Conversations on the first problems of the test set, with direct answers at equal tokens; `asked` is reused."""
    progress = begin("equal tokens", len(played), "problems")

    async def match(index: int, each: PlayedProblem) -> PlayedProblem:
        have = list(asked[index].answers) if index < len(asked) else []
        answers = await _answers_within(sampler, direct, index, each, have)
        progress.on_reply(sum(answer.num_tokens for answer in answers[len(have) :]))
        progress.on_group(answers)
        return replace(each, direct=with_votes(answers, direct.check))

    return tuple(await gather_or_cancel(match(index, each) for index, each in enumerate(played)))


async def _ask(
    sampler: SamplingClient,
    direct: DirectSampler,
    index: int,
    item: PromptItem,
    numbers: range,
    progress: StepProgress | None = None,
) -> list[Answer]:
    async def ask(number: int) -> Answer:
        answer, _ = await direct.sample(sampler, index, item, number)
        if progress is not None:
            progress.on_reply(answer.num_tokens)
            progress.on_group(answer)
        return answer

    return await gather_or_cancel(map(ask, numbers))


async def _answers_within(
    sampler: SamplingClient,
    direct: DirectSampler,
    index: int,
    conversation: PlayedProblem,
    answers: list[Answer],
) -> list[Answer]:
    """The answers 0, 1, 2, ... to a problem up to the one that would exceed the conversation's tokens.

    They are drawn in waves, each as many as probably are needed still.
    """
    item = PromptItem(question=conversation.question, answer=conversation.answer)
    budget = conversation.num_tokens
    while True:
        used = sum(answer.num_tokens for answer in answers)
        if answers and (used > budget or len(answers) >= _MOST_DIRECT_ANSWERS):
            totals = list(accumulate(answer.num_tokens for answer in answers))
            num_within = max(1, bisect_right(totals, budget))
            return answers[: min(num_within, _MOST_DIRECT_ANSWERS)]
        if answers and not used:
            return answers[:1]  # the question does not fit; asking again would not change that
        mean = max(used / len(answers), 1.0) if answers else float(direct.sampling.max_tokens)
        wanted = len(answers) + max(1, math.ceil((budget - used) / mean))
        answers = answers + await _ask(
            sampler, direct, index, item, range(len(answers), min(wanted, _MOST_DIRECT_ANSWERS))
        )
