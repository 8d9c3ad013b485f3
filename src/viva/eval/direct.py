"""Direct answers to the bare question: one to each in training, many where policies are measured.

Equal tokens: a conversation costs many replies, so it is compared with as many direct answers as fit into the tokens
that it took on the same problem, the judge's included. Their number depends on the problem's own answers only.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tinker_cookbook.renderers.base import Renderer

from viva.conversation.coordinator import gather_or_cancel
from viva.conversation.rendering import build_prompt, direct_messages, read_reply
from viva.eval.records import WRONG, Answer, Asked, Played
from viva.judging.answers import answer_key, is_correct
from viva.judging.judge import SamplingClient
from viva.training.console import Begin, StepProgress, unseen
from viva.training.data import PromptItem, derive_seed
from viva.training.rollouts import PromptTooLongError, SeededCompleter

_MOST_DIRECT_ANSWERS = 1024
"""Per problem, at equal tokens: a bound for replies of a token or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectSampler:
    """Asks bare questions; their seeds do not depend on the policy, so changes come from the weights."""

    renderer: Renderer
    seed: int
    max_tokens: int
    temperature: float = 1.0
    system_prompt: str | None = None
    context_window: int | None = None
    grader: Callable[[str, str], bool] = is_correct
    vote: Callable[[str], str | None] = answer_key

    async def answer(
        self,
        sampler: SamplingClient,
        index: int,
        item: PromptItem,
        number: int = 0,
        progress: StepProgress | None = None,
    ) -> Answer:
        """One answer, graded; a reply that is cut off, unreadable or not given (the question does not fit) is wrong.

        The seed comes from the question's place in the test set and the answer's number.
        """
        answer, _ = await self.sample(sampler, index, item, number)
        if progress is not None:
            progress.on_reply(answer.num_tokens)
            progress.on_group(answer)
        return answer

    async def sample(
        self, sampler: SamplingClient, index: int, item: PromptItem, number: int
    ) -> tuple[Answer, Sequence[float]]:
        """One answer, as `answer`, and the sampling logprobs of its tokens in nats."""
        place = (index, number) if number else (index,)
        completer = SeededCompleter(
            sampler=sampler,
            seed=derive_seed(self.seed, "direct", *place),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            context_window=self.context_window,
        )
        prompt = build_prompt(self.renderer, direct_messages(item.question, self.system_prompt))
        try:
            reply = await completer(prompt, self.renderer.get_stop_sequences())
        except PromptTooLongError:
            return WRONG, ()
        text, is_clean = read_reply(self.renderer, reply.tokens)
        is_finished = is_clean and reply.stop_reason == "stop"
        answer = Answer(
            right=is_finished and self.grader(text, item.answer or ""),
            vote=self.vote(text) if is_finished else None,
            finished=is_finished,
            num_tokens=len(reply.tokens),
            text=text,
        )
        return answer, reply.logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectEvaluator:
    """Accuracy on questions with known answers, all of which are in the denominator; see `DirectSampler`."""

    items: Sequence[PromptItem]
    direct: DirectSampler
    begin: Begin = unseen
    """Called when questions begin."""

    def __post_init__(self) -> None:
        """Reject a test set that is empty or has a question without a known answer."""
        missing = sum(item.answer is None for item in self.items)
        if not self.items or missing:
            raise ValueError(
                f"direct accuracy needs questions with answers; got {len(self.items)}, {missing} without answer"
            )

    async def __call__(self, sampler: SamplingClient, step: int) -> Mapping[str, float]:
        """Ask all questions at once; metrics ``test/direct_*``."""
        del step  # seeds are the same at every step
        progress = self.begin("test questions", len(self.items), "questions")
        return direct_metrics(
            await gather_or_cancel(
                self.direct.answer(sampler, index, item, progress=progress)
                for index, item in enumerate(self.items)
            )
        )

    def reporting(self, begin: Begin) -> "DirectEvaluator":
        """The same evaluator with progress."""
        return replace(self, begin=begin)


def direct_metrics(answers: Sequence[Answer]) -> dict[str, float]:
    """The metrics ``test/direct_*`` of one answer to every question."""
    count = len(answers)
    accuracy = sum(answer.right for answer in answers) / count
    return {
        "test/direct_accuracy": accuracy,
        "test/direct_accuracy_stderr": math.sqrt(accuracy * (1 - accuracy) / count),
        "test/direct_questions": count,
        "test/direct_finish_rate": sum(answer.finished for answer in answers) / count,
        "test/direct_reply_tokens": sum(answer.num_tokens for answer in answers) / count,
    }


async def ask_all(
    sampler: SamplingClient,
    direct: DirectSampler,
    items: Sequence[PromptItem],
    num_samples: int,
    begin: Begin = unseen,
) -> tuple[tuple[Asked, ...], dict[str, float]]:
    """Ask every question a number of times; answers, and the metrics of the first one to each."""
    progress = begin("direct", len(items) * num_samples, "answers")
    asked = await gather_or_cancel(
        _ask(sampler, direct, index, item, range(num_samples), progress) for index, item in enumerate(items)
    )
    found = tuple(
        Asked(question=item.question, answer=item.answer or "", answers=tuple(answers))
        for item, answers in zip(items, asked, strict=True)
    )
    return found, direct_metrics([each.answers[0] for each in found])


async def match_tokens(
    sampler: SamplingClient,
    direct: DirectSampler,
    played: Sequence[Played],
    asked: Sequence[Asked] = (),
    begin: Begin = unseen,
) -> tuple[Played, ...]:
    """Conversations on the first problems of the test set, with direct answers at equal tokens; `asked` is reused."""
    progress = begin("equal tokens", len(played), "problems")

    async def match(index: int, each: Played) -> Played:
        have = list(asked[index].answers) if index < len(asked) else []
        answers = await _answers_within(sampler, direct, index, each, have)
        progress.on_reply(sum(answer.num_tokens for answer in answers[len(have) :]))
        progress.on_group(answers)
        return replace(each, direct=tuple(answers))

    return tuple(await gather_or_cancel(match(index, each) for index, each in enumerate(played)))


async def _ask(
    sampler: SamplingClient,
    direct: DirectSampler,
    index: int,
    item: PromptItem,
    numbers: range,
    progress: StepProgress | None = None,
) -> list[Answer]:
    return await gather_or_cancel(direct.answer(sampler, index, item, number, progress) for number in numbers)


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
        if answers and (used > budget or len(answers) >= _MOST_DIRECT_ANSWERS):
            return _prefix(answers, budget)
        if answers and not used:
            return answers[:1]  # the question does not fit; asking again would not change that
        mean = max(used / len(answers), 1.0) if answers else float(direct.max_tokens)
        wanted = len(answers) + max(1, math.ceil((budget - used) / mean))
        answers = answers + await _ask(
            sampler, direct, index, item, range(len(answers), min(wanted, _MOST_DIRECT_ANSWERS))
        )


def _prefix(answers: Sequence[Answer], budget: int) -> list[Answer]:
    kept: list[Answer] = []
    used = 0
    for answer in answers[:_MOST_DIRECT_ANSWERS]:
        used += answer.num_tokens
        if kept and used > budget:
            break
        kept.append(answer)
    return kept
