"""From a conversation's transcript to what every agent answered, with denominators that nothing changes.

Solutions are graded here and not taken from the conversation's own metrics, because those count what was said: here a
solution that was cut off at the token limit, or a reply in which none could be found, is wrong, an agent that failed
is wrong, and all agents of a void conversation are.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from viva.conversation.records import ReplyStatus
from viva.eval.checks import AnswerCheck
from viva.eval.records import WRONG, AgentAnswers, Answer, Played
from viva.training.prompts import PromptItem
from viva.training.rollouts import GroupOutcome

__all__ = ["read_outcome"]

_Turn = Mapping[str, Any]


def read_outcome(
    outcome: GroupOutcome, item: PromptItem, *, num_agents: int, check: AnswerCheck, num_judge_tokens: int
) -> Played:
    """What the agents of one conversation answered.

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
    """Of every turn, whether the policy ended it and how many tokens it took.

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
    """What the conversation made of every final solution: the fitted scores where there are, else the rewards."""
    return record.get("scores", {}).get("final") or record["rewards"]
