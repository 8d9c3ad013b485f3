"""Conversations on held-out prompts, on which nothing is trained.

`ConversationEvaluator` gives the training loop's own metrics of them, which count what was said. `play_all` grades the
solutions itself, with a constant denominator: a solution that was cut off at the token limit or could not be read is
wrong, so is an agent that failed, and so are all agents of a void conversation.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tinker_cookbook.rl.types import EnvGroupBuilder

from viva.conversation.records import ReplyStatus, Solution, Turn
from viva.eval.records import WRONG, AgentAnswers, Answer, PlayedProblem, with_votes
from viva.experts.strategy import record_of
from viva.judging.answers import AnswerCheck
from viva.judging.judge import SamplingClient
from viva.judging.records import ConversationRecord
from viva.judging.usage import Usage
from viva.rewards.base import Grader
from viva.training.console import Begin, unseen
from viva.training.data import BuilderFactory, PromptItem, derive_seed
from viva.training.metrics import rollout_metrics
from viva.training.rollouts import GroupOutcome, run_groups
from viva.training.sampling import Sampling, SeatSampler


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationEvaluator:
    """Plays the same groups at every evaluation, with the same seeds, and reports the loop's rollout metrics."""

    make_builders: Callable[[], Sequence[EnvGroupBuilder]]
    """Fresh builders for one evaluation; their seeds come from `group_seed`."""
    sampling: Sampling

    async def __call__(
        self, sampler: SamplingClient, step: int, begin: Begin = unseen
    ) -> Mapping[str, float]:
        """Metrics ``test/conversation/*``."""
        return _metrics(await _play(sampler, self.make_builders(), self.sampling, begin))


async def _play(
    sampler: SamplingClient, builders: Sequence[EnvGroupBuilder], sampling: Sampling, begin: Begin
) -> list[GroupOutcome]:
    """The outcome of every group, in the order of the builders."""
    progress = begin("test conversations", len(builders), "conversations")
    policy = SeatSampler(
        sampler=sampler, sampling=sampling.seeded("test conversations"), on_reply=progress.on_reply
    )
    return await run_groups(
        builders,
        policy,
        max_retries=sampling.max_retries,
        on_group=lambda _, outcome: progress.on_group(outcome),
    )


def _metrics(outcomes_P: Sequence[GroupOutcome]) -> dict[str, float]:
    return {f"test/conversation/{key}": value for key, value in rollout_metrics(outcomes_P).items()}


def group_seed(seed: int, index: int) -> int:
    """The seed of the test conversation on the prompt at a place of the test set."""
    return derive_seed(seed, "test group", index)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationKind:
    """One kind of conversation, to be played on problems."""

    num_agents: int
    factory: Callable[[Grader], BuilderFactory]
    """Given a grader for the metrics, returns what makes a conversation of a problem and a seed."""
    sampling: Sampling
    begin: Begin = unseen


class _KeptGrader:
    """Grades each text once, and keeps what a user's check raises, since a conversation would only be void by it."""

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
    sampler: SamplingClient, conversations: ConversationKind, items: Sequence[PromptItem], check: AnswerCheck
) -> tuple[tuple[PlayedProblem, ...], list[GroupOutcome], dict[str, float]]:
    """Hold one conversation on every problem; what was answered, the outcomes, and the loop's metrics.

    What the check raises passes through.
    """
    grader = _KeptGrader(check, on_error=lambda: playing.cancel())
    make_builder = conversations.factory(grader)
    sampling = conversations.sampling
    builders = [make_builder(item, group_seed(sampling.seed, index)) for index, item in enumerate(items)]
    playing = asyncio.create_task(_play(sampler, builders, sampling, conversations.begin))
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
        _read_outcome(outcome, item, conversations.num_agents, kept)
        for outcome, item in zip(outcomes, items, strict=True)
    )
    return played, outcomes, _metrics(outcomes)


def _read_outcome(
    outcome: GroupOutcome, item: PromptItem, num_agents: int, check: AnswerCheck
) -> PlayedProblem:
    """The answers of all agents that the conversation should have had."""
    answer = item.answer or ""
    policy, judge = (outcome.usage.get(role, Usage()) for role in ("policy", "judge"))
    agents = [AgentAnswers(first=WRONG, final=WRONG, score=None)] * num_agents
    if outcome.group is not None:
        record = ConversationRecord.model_validate(record_of(outcome.builder))
        scores = record.scores.final or record.rewards
        solutions: list[list[Answer]] = [[] for _ in agents]
        for turn, ending in zip(record.turns, _endings(outcome, record, num_agents), strict=True):
            if isinstance(turn.response, Solution):
                solutions[turn.agent_id].append(_graded(turn, turn.response, *ending, answer, check))
        graded = iter(with_votes([each for own in solutions for each in own], check))
        for agent_id, own in enumerate([[next(graded) for _ in own] for own in solutions]):
            score = scores.get(agent_id)
            has_answer = own and score is not None  # else it failed, or never came to an answer
            first, final = (own[0], own[-1]) if has_answer else (WRONG, WRONG)
            agents[agent_id] = AgentAnswers(first=first, final=final, score=score)
    return PlayedProblem(
        question=item.question,
        answer=answer,
        agents=tuple(agents),
        num_tokens=policy.sampled_tokens + judge.sampled_tokens,
        num_judge_tokens=judge.sampled_tokens,
        void_reason=outcome.void_reason,
    )


def _graded(
    turn: Turn, said: Solution, is_finished: bool, num_tokens: int, answer: str, check: AnswerCheck
) -> Answer:
    is_read = is_finished and turn.status is not ReplyStatus.UNSTRUCTURED
    return Answer(
        right=is_read and check.is_right(said.solution, answer),
        vote=check.vote(said.solution) if is_read else None,
        finished=is_finished,
        num_tokens=num_tokens,
        text=said.solution,
    )


def _endings(outcome: GroupOutcome, record: ConversationRecord, num_agents: int) -> list[tuple[bool, int]]:
    """The ends of all turns: whether the policy ended it, and how many tokens it took.

    Seats come agent by agent and lane by lane, and a seat's transitions are the replies it wrote, in order.
    """
    trajectories = outcome.group.trajectories_G if outcome.group is not None else []
    num_lanes = len(trajectories) // num_agents
    taken = [0] * len(trajectories)
    endings: list[tuple[bool, int]] = []
    for turn in record.turns:
        if not turn.response.is_sampled:
            endings.append((True, 0))
            continue
        seat = turn.agent_id * num_lanes + turn.lane
        transitions = trajectories[seat].transitions
        if taken[seat] < len(transitions):
            action = transitions[taken[seat]].ac
            endings.append((action.stop_reason == "stop", len(action.tokens)))
        else:
            endings.append((False, 0))  # of a seat that failed later: its trajectory is not kept
        taken[seat] += 1
    return endings
