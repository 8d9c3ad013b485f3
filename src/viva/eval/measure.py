"""Asking and playing all problems of a test set, on any sampling client.

Equal tokens: a conversation costs many replies, so it has to be compared with as many direct answers as fit into the
tokens that it took on the same problem, the judge's and the critiques included. How many these are depends on nothing
but the problem's own answers, so it is the same in every run.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tinker_cookbook.rl.types import EnvGroupBuilder

from viva.conversation.together import together
from viva.eval.checks import AnswerCheck
from viva.eval.conversations import ConversationEvaluator, group_seed
from viva.eval.direct import DirectSampler, direct_metrics
from viva.eval.metering import MeteredClient
from viva.eval.played import read_outcome
from viva.eval.records import Answer, Asked, Played
from viva.judging.policy import PolicyRef, SamplingClient
from viva.selfplay.group import Grader
from viva.training.progress import Begin, StepProgress, unseen
from viva.training.prompts import PromptItem
from viva.training.rollouts import GroupOutcome

__all__ = ["BuilderMaker", "Conversations", "ask_all", "match_tokens", "play_all"]

MOST_DIRECT_ANSWERS = 1024
"""Per problem, at equal tokens: a bound for replies of a token or two."""

BuilderMaker = Callable[[PromptItem, int, PolicyRef, Grader], EnvGroupBuilder]
"""One conversation on a problem, from its seed, who judges, and how solutions are graded for the metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """One kind of conversation, and how it is sampled."""

    num_agents: int
    make_builder: BuilderMaker
    seed: int
    max_tokens: int
    temperature: float = 1.0
    context_window: int | None = None
    policy_timeout_s: float | None = None
    max_retries: int = 1
    judge: SamplingClient | None = None
    """``None``: the policy that talks."""


class _KeptGrader:
    """Grades each text once, and keeps what a user's check raises: inside a conversation it would void that only.

    Args:
        check: How.
        on_error: Is called when the check has raised.
    """

    def __init__(self, check: AnswerCheck, *, on_error: Callable[[], object]) -> None:
        self._check = check
        self._known: dict[tuple[str, str], bool] = {}
        self._on_error = on_error
        self.errors: list[Exception] = []

    def __call__(self, text: str, answer: str) -> bool:
        key = (text, answer)
        if key not in self._known:
            try:
                self._known[key] = self._check.is_right(text, answer)
            except Exception as error:
                self.errors.append(error)
                self._on_error()
                raise
        return self._known[key]


async def ask_all(
    sampler: SamplingClient,
    direct: DirectSampler,
    items: Sequence[PromptItem],
    num_samples: int,
    begin: Begin = unseen,
) -> tuple[tuple[Asked, ...], dict[str, float]]:
    """Ask every question a number of times; answers, and the metrics of the first one to each."""
    progress = begin("direct", len(items) * num_samples, "answers")
    asked = await together(
        _ask(sampler, direct, index, item, range(num_samples), progress) for index, item in enumerate(items)
    )
    found = tuple(
        Asked(question=item.question, answer=item.answer or "", answers=tuple(answers))
        for item, answers in zip(items, asked, strict=True)
    )
    return found, direct_metrics([each.answers[0] for each in found])


async def play_all(
    sampler: SamplingClient,
    conversations: Conversations,
    items: Sequence[PromptItem],
    check: AnswerCheck,
    begin: Begin = unseen,
) -> tuple[tuple[Played, ...], list[GroupOutcome], dict[str, float]]:
    """Hold one conversation on every problem; what was answered, the outcomes themselves, and the loop's metrics.

    Raises:
        Exception: What the check raises.
    """
    grader = _KeptGrader(check, on_error=lambda: playing.cancel())
    judges = [MeteredClient(conversations.judge or sampler) for _ in items]
    evaluator = ConversationEvaluator(
        make_builders=lambda: [
            conversations.make_builder(
                item,
                group_seed(conversations.seed, index),
                PolicyRef(sampling_client=judge, timeout_s=conversations.policy_timeout_s),
                grader,
            )
            for index, (item, judge) in enumerate(zip(items, judges, strict=True))
        ],
        seed=conversations.seed,
        max_tokens=conversations.max_tokens,
        temperature=conversations.temperature,
        context_window=conversations.context_window,
        policy_timeout_s=conversations.policy_timeout_s,
        max_retries=conversations.max_retries,
        begin=begin,
    )
    playing = asyncio.create_task(evaluator.play(sampler))
    try:
        outcomes = await playing
    except asyncio.CancelledError:
        if grader.errors:  # else the evaluation itself was interrupted
            raise grader.errors[0] from None
        raise
    if grader.errors:  # in the last conversation, which had ended before it could be stopped
        raise grader.errors[0]
    kept = replace(check, is_right=grader)
    played = tuple(
        read_outcome(
            outcome,
            item,
            num_agents=conversations.num_agents,
            check=kept,
            num_judge_tokens=judge.num_tokens,
        )
        for outcome, item, judge in zip(outcomes, items, judges, strict=True)
    )
    return played, outcomes, evaluator.metrics(outcomes)


async def match_tokens(
    sampler: SamplingClient,
    direct: DirectSampler,
    played: Sequence[Played],
    asked: Sequence[Asked] = (),
    begin: Begin = unseen,
) -> tuple[Played, ...]:
    """The same conversations with direct answers at equal tokens.

    Args:
        sampler: The policy.
        direct: Asks.
        played: The conversations, on the first problems of the test set.
        asked: Answers that are there already.
        begin: Is told that problems begin.
    """
    progress = begin("equal tokens", len(played), "problems")

    async def match(index: int, each: Played) -> Played:
        have = list(asked[index].answers) if index < len(asked) else []
        answers = await _answers_within(sampler, direct, index, each, have)
        progress.on_reply(sum(answer.num_tokens for answer in answers[len(have) :]))
        progress.on_group(answers)
        return replace(each, direct=tuple(answers))

    return tuple(await together(match(index, each) for index, each in enumerate(played)))


async def _ask(
    sampler: SamplingClient,
    direct: DirectSampler,
    index: int,
    item: PromptItem,
    numbers: range,
    progress: StepProgress | None = None,
) -> list[Answer]:
    return await together(direct.answer(sampler, index, item, number, progress) for number in numbers)


async def _answers_within(
    sampler: SamplingClient, direct: DirectSampler, index: int, conversation: Played, answers: list[Answer]
) -> list[Answer]:
    """The answers 0, 1, 2, ... to a problem up to the one that would exceed the conversation's tokens.

    They are drawn in waves, each as many as probably are needed still.
    """
    item = PromptItem(question=conversation.question, answer=conversation.answer)
    budget = conversation.num_tokens
    while True:
        used = sum(answer.num_tokens for answer in answers)
        if answers and (used > budget or len(answers) >= MOST_DIRECT_ANSWERS):
            return _prefix(answers, budget)
        if answers and not used:
            return answers[:1]  # the question does not fit; asking again would not change that
        mean = max(used / len(answers), 1.0) if answers else float(direct.max_tokens)
        wanted = len(answers) + max(1, math.ceil((budget - used) / mean))
        answers = answers + await _ask(
            sampler, direct, index, item, range(len(answers), min(wanted, MOST_DIRECT_ANSWERS))
        )


def _prefix(answers: Sequence[Answer], budget: int) -> list[Answer]:
    kept: list[Answer] = []
    used = 0
    for answer in answers[:MOST_DIRECT_ANSWERS]:
        used += answer.num_tokens
        if kept and used > budget:
            break
        kept.append(answer)
    return kept
