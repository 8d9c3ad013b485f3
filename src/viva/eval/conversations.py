"""Conversations on held-out prompts: nothing is trained on what they say.

`ConversationEvaluator` gives the training loop's own metrics of them. `play_all` also reads what every agent answered,
with denominators that nothing changes: solutions are graded here and not taken from the conversation's own metrics,
because those count what was said. Here a solution that was cut off at the token limit, or a reply in which none could
be found, is wrong, an agent that failed is wrong, and all agents of a void conversation are.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import tinker
from tinker_cookbook.rl.types import EnvGroupBuilder

from viva.conversation.records import ReplyStatus
from viva.eval.answers import AnswerCheck
from viva.eval.records import WRONG, AgentAnswers, Answer, Played
from viva.judging.policy import PolicyRef, SamplingClient, response_of
from viva.rewards.base import Grader
from viva.training.console import Begin, unseen
from viva.training.data import PromptItem, derive_seed
from viva.training.metrics import rollout_metrics
from viva.training.rollouts import GroupOutcome, Policy, run_groups

BuilderMaker = Callable[[PromptItem, int, PolicyRef, Grader], EnvGroupBuilder]
"""One conversation on a problem, from its seed, who judges, and how solutions are graded for the metrics."""

_Turn = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationEvaluator:
    """Plays the same groups at every evaluation, with the same seeds, and reports the loop's rollout metrics."""

    make_builders: Callable[[], Sequence[EnvGroupBuilder]]
    """Fresh builders for one evaluation; their seeds come from `group_seed`."""
    seed: int
    max_tokens: int
    temperature: float = 1.0
    context_window: int | None = None
    policy_timeout_s: float | None = None
    max_retries: int = 1
    """Retries of a conversation that failed."""
    prefix: str = "test/conversation/"
    begin: Begin = unseen
    """Called when conversations begin."""

    def reporting(self, begin: Begin) -> "ConversationEvaluator":
        """The same evaluator with progress."""
        return replace(self, begin=begin)

    async def __call__(self, sampler: SamplingClient, step: int) -> Mapping[str, float]:
        """Metrics with the prefix."""
        del step  # seeds are the same at every step
        return self.metrics(await self.play(sampler))

    async def play(self, sampler: SamplingClient) -> list[GroupOutcome]:
        """The outcome of every group, in the order of the builders."""
        builders = self.make_builders()
        progress = self.begin("test conversations", len(builders), "conversations")
        policy = Policy(
            sampler=sampler,
            seed=derive_seed(self.seed, "test conversations"),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            context_window=self.context_window,
            timeout_s=self.policy_timeout_s,
            on_reply=progress.on_reply,
        )
        return await run_groups(
            builders,
            policy,
            max_retries=self.max_retries,
            on_group=lambda _, outcome: progress.on_group(outcome),
        )

    def metrics(self, outcomes_P: Sequence[GroupOutcome]) -> dict[str, float]:
        """Rollout metrics of groups, with the prefix."""
        return {self.prefix + key: value for key, value in rollout_metrics(outcomes_P).items()}


def group_seed(seed: int, index: int) -> int:
    """The seed of the test conversation on the prompt at a place of the test set."""
    return derive_seed(seed, "test group", index)


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


class MeteredClient:
    """A sampling client that passes calls on and counts the tokens of what comes back."""

    def __init__(self, client: SamplingClient) -> None:
        self._client = client
        self.num_tokens = 0
        """Sampled so far, over all samples of all calls."""

        # the signature stays that of the client: judges look there for what it can return
        @functools.wraps(client.sample)
        async def sample(*args: Any, **options: Any) -> tinker.SampleResponse:
            return await self._sample(*args, **options)

        self.sample = sample

    async def _sample(self, *args: Any, **options: Any) -> tinker.SampleResponse:
        response = await response_of(self._client.sample(*args, **options))
        self.num_tokens += sum(len(sequence.tokens) for sequence in response.sequences)
        return response


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
        _read_outcome(
            outcome,
            item,
            num_agents=conversations.num_agents,
            check=kept,
            num_judge_tokens=judge.num_tokens,
        )
        for outcome, item, judge in zip(outcomes, items, judges, strict=True)
    )
    return played, outcomes, evaluator.metrics(outcomes)


def _read_outcome(
    outcome: GroupOutcome, item: PromptItem, *, num_agents: int, check: AnswerCheck, num_judge_tokens: int
) -> Played:
    """The answers of the agents of one conversation.

    Args:
        outcome: Of a group whose builder keeps a record, see `viva.selfplay`.
        item: The problem, with its answer.
        num_agents: Agents that the conversation should have.
        check: Grades solutions.
        num_judge_tokens: What the judge sampled for this conversation.
    """
    agents = tuple(AgentAnswers(first=WRONG, final=WRONG, score=None) for _ in range(num_agents))
    if outcome.group is not None:
        record = cast("Mapping[str, Any]", cast(Any, outcome.builder).record())
        finished = _finished(outcome, record["turns"], num_agents)
        scores = _scores(record)
        agents = tuple(
            _agent(agent_id, record["turns"], finished, scores, item.answer or "", check)
            for agent_id in range(num_agents)
        )
    return Played(
        question=item.question,
        answer=item.answer or "",
        agents=agents,
        num_tokens=outcome.num_sampled_tokens + num_judge_tokens,
        num_judge_tokens=num_judge_tokens,
        void_reason=outcome.void_reason,
    )


def _agent(
    agent_id: int,
    turns: Sequence[_Turn],
    finished: Sequence[tuple[bool, int]],
    scores: Mapping[str, float],
    answer: str,
    check: AnswerCheck,
) -> AgentAnswers:
    solutions = [
        _answer(turn, *ending, answer, check)
        for turn, ending in zip(turns, finished, strict=True)
        if turn["agent_id"] == agent_id and "solution" in turn["response"]
    ]
    score = scores.get(str(agent_id))
    if score is None or not solutions:  # it failed, or never came to an answer
        return AgentAnswers(first=WRONG, final=WRONG, score=score)
    return AgentAnswers(first=solutions[0], final=solutions[-1], score=score)


def _answer(turn: _Turn, is_finished: bool, num_tokens: int, answer: str, check: AnswerCheck) -> Answer:
    text: str = turn["response"]["solution"]
    is_read = is_finished and turn["status"] != ReplyStatus.UNSTRUCTURED.value
    return Answer(
        right=is_read and check.is_right(text, answer),
        vote=check.vote(text) if is_read else None,
        finished=is_finished,
        num_tokens=num_tokens,
        text=text,
    )


def _finished(outcome: GroupOutcome, turns: Sequence[_Turn], num_agents: int) -> list[tuple[bool, int]]:
    """By turn: whether the policy ended it, and how many tokens it took.

    Seats come agent by agent and lane by lane, and a seat's transitions are its turns in order.
    """
    trajectories = outcome.group.trajectories_G if outcome.group is not None else []
    num_lanes = len(trajectories) // num_agents
    taken = [0] * len(trajectories)
    endings: list[tuple[bool, int]] = []
    for turn in turns:
        seat = turn["agent_id"] * num_lanes + turn["lane"]
        transitions = trajectories[seat].transitions
        if taken[seat] < len(transitions):
            action = transitions[taken[seat]].ac
            endings.append((action.stop_reason == "stop", len(action.tokens)))
        else:
            endings.append((False, 0))  # of a seat that failed later: its trajectory is not kept
        taken[seat] += 1
    return endings


def _scores(record: Mapping[str, Any]) -> Mapping[str, float]:
    """The conversation's scores of the final solutions: fitted ones where there are, else the rewards."""
    return record.get("scores", {}).get("final") or record["rewards"]
