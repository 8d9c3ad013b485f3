"""Figures of one critique conversation: scores, critiques, flips, health of the ballots, reward against truth.

Every function returns metrics that the loop averages by name over those agents that report them; what is about a
whole conversation is reported by each of its agents.
"""

import math
from collections.abc import Mapping, Sequence

from tinker_cookbook.rl.types import Metrics

from viva.conversation.records import Conversation, CritiqueReply, ReplyStatus, Revision
from viva.judging.ballot_health import ballot_health
from viva.judging.comparison import Comparison, same_words
from viva.judging.ranking import RankingReply
from viva.judging.tournament import judge_health
from viva.rewards.review import ReviewScores, ReviewVotes
from viva.selfplay.truth import ballot_accuracy, flips, rank_correlation, reward_truth_gap

__all__ = ["review_metrics"]


def review_metrics(
    conversation: Conversation,
    scores: ReviewScores,
    votes: ReviewVotes,
    judged: Mapping[int, Sequence[Comparison]],
    *,
    correct_initial: Mapping[int, bool] | None,
    correct: Mapping[int, bool] | None,
) -> dict[int, Metrics]:
    """Metrics by agent, for those that finished.

    Args:
        conversation: What was said.
        scores: What it earned.
        votes: The ballots.
        judged: Comparisons of initial (0) with revised (1) solutions, by agent.
        correct_initial: Whether each initial solution is right, where that is known.
        correct: Whether each revised solution is right.
    """
    shared: Metrics = {"episode_length": len(conversation.turns)}
    shared |= _health(conversation, votes) | _revision_judge_health(judged)
    if correct_initial is not None and correct is not None:
        shared |= _truth(scores, votes, correct_initial, correct)
    received = _received(conversation)
    flip_A = flips(correct_initial or {}, correct or {})
    metrics_A: dict[int, Metrics] = {}
    for agent_id in votes.agents:
        own = _spoken(conversation, agent_id) | {"critiques/received": received.get(agent_id, 0)}
        before, after = scores.initial[agent_id].value, scores.final[agent_id].value
        own |= {
            f"agent_{agent_id}/reward": scores.totals[agent_id],
            f"agent_{agent_id}/score_initial": before,
            f"agent_{agent_id}/score_final": after,
            f"agent_{agent_id}/score_change": after - before,
        }
        own["gain/mean"] = scores.gains[agent_id].value
        own["gain/paid"] = scores.gains[agent_id].paid
        own["gain/measured"] = float(scores.gains[agent_id].measured)
        if correct_initial is not None and correct is not None:
            own |= {
                "correct/first": float(correct_initial[agent_id]),
                "correct/final": float(correct[agent_id]),
                f"agent_{agent_id}/correct": float(correct[agent_id]),
            }
        metrics_A[agent_id] = own | flip_A.get(agent_id, {}) | shared
    return metrics_A


def _spoken(conversation: Conversation, agent_id: int) -> Metrics:
    """What one agent said, in numbers."""
    turns = [turn for turn in conversation.turns if turn.agent_id == agent_id]
    metrics: Metrics = {"parsing_failures": sum(turn.status is ReplyStatus.UNSTRUCTURED for turn in turns)}
    before = conversation.solutions("proposal")[agent_id]
    for turn in turns:
        if isinstance(turn.response, CritiqueReply):
            metrics["critiques/given"] = len(turn.response.critiques)
            metrics["critiques/dropped"] = sum(turn.response.dropped.values())
        elif isinstance(turn.response, Revision):
            metrics["revision/changed"] = float(not same_words(before, turn.response.solution))
            metrics["revision/says_revise"] = float(turn.response.decision == "revise")
            metrics["revision/says_defend"] = float(turn.response.decision == "defend")
    return metrics


def _received(conversation: Conversation) -> dict[int, int]:
    received: dict[int, int] = {}
    for turn in conversation.turns:
        if isinstance(turn.response, CritiqueReply):
            for critique in turn.response.critiques:
                received[critique.target] = received.get(critique.target, 0) + 1
    return received


def _health(conversation: Conversation, votes: ReviewVotes) -> Metrics:
    """Of the blind ranking and of the verdict; agents with an even id saw one order, the others its reverse."""
    metrics: Metrics = {}
    for name, ballots, segment in (
        ("ranking", votes.initial, "proposal"),
        ("verdict", votes.final, "revision"),
    ):
        figures = ballot_health(
            ballots,
            forward=[voter for voter in ballots if voter % 2 == 0],
            own={voter: voter for voter in ballots},
            # also of agents that failed later: they were voted on
            lengths={agent_id: len(text) for agent_id, text in conversation.solutions(segment).items()},
            unreadable=[
                turn.agent_id
                for turn in conversation.turns
                if turn.segment == name
                and isinstance(turn.response, RankingReply)
                and turn.response.dropped.get("unreadable")
            ],
        )
        metrics |= {f"judge/{name}/{figure}": value for figure, value in figures.items()}
    return metrics


def _revision_judge_health(judged: Mapping[int, Sequence[Comparison]]) -> Metrics:
    """Of the judge that compares revised with initial solutions: means over the agents it was asked about."""
    columns: dict[str, list[float]] = {}
    for comparisons in judged.values():
        for name, value in judge_health(comparisons).items():
            columns.setdefault(f"judge/revision/{name.removeprefix('judge/')}", []).append(value)
    return {name: math.fsum(column) / len(column) for name, column in columns.items()}


def _truth(
    scores: ReviewScores,
    votes: ReviewVotes,
    correct_initial: Mapping[int, bool],
    correct: Mapping[int, bool],
) -> Metrics:
    """How scores and ballots relate to the known answers; what has nothing to compare is left out."""
    final = {agent_id: scores.final[agent_id].value for agent_id in votes.agents}
    best = max(final.values())
    chosen = [correct[agent_id] for agent_id, score in final.items() if score == best]
    figures: dict[str, float | None] = {
        "correct/best": sum(chosen) / len(chosen),
        "rank_correlation": rank_correlation(final, correct),
        "reward_truth_gap": reward_truth_gap(final, correct),
        "judge/ranking/accuracy": ballot_accuracy(votes.initial, correct_initial),
        "judge/verdict/accuracy": ballot_accuracy(votes.final, correct),
    }
    return {name: value for name, value in figures.items() if value is not None}
