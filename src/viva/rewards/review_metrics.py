"""Figures of one critique conversation: scores, critiques, flips, health of the ballots, reward against truth.

Figures about the truth need known answers and never enter a reward.

Every function returns metrics that the loop averages by name over those agents that report them; what is about a
whole conversation is reported by each of its agents.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from tinker_cookbook.rl.types import Metrics

from viva.conversation.records import Conversation, CritiqueReply, ReplyStatus, Revision
from viva.judging.ballots import Ballots, Preference, ballot_health, pooled
from viva.judging.comparison import Comparison, judge_health, same_words
from viva.judging.ranking import RankingReply
from viva.rewards.review import ReviewScores, ReviewVotes


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


def ballot_accuracy(ballots: Ballots, correct: Mapping[int, bool]) -> float | None:
    """Share of the votes on a right and a wrong solution that prefer the right one, a tie counting half.

    Args:
        ballots: Votes on agent ids; those on anything else are left out.
        correct: By agent id.

    Returns:
        In [0, 1], or ``None`` if there is no such vote.

    Raises:
        ValueError: If a voter voted twice on a pair.
    """
    points: list[float] = []
    for vote in pooled(ballots):
        one, other = (vote.winner, vote.loser) if isinstance(vote, Preference) else (vote.first, vote.second)
        if not (isinstance(one, int) and isinstance(other, int) and one in correct and other in correct):
            continue
        if correct[one] != correct[other]:
            points.append(float(correct[one]) if isinstance(vote, Preference) else 0.5)
    return math.fsum(points) / len(points) if points else None


def flips(before: Mapping[int, bool], after: Mapping[int, bool]) -> dict[int, dict[str, float]]:
    """Per agent, what revising did to its solution.

    ``flip/right_to_wrong`` is given for agents that were right before and is 1 if they are wrong after, so its mean
    over agents is the share of right solutions that were lost; ``flip/wrong_to_right`` likewise.
    """
    figures: dict[int, dict[str, float]] = {}
    for agent_id in sorted(before.keys() & after.keys()):
        name = "flip/right_to_wrong" if before[agent_id] else "flip/wrong_to_right"
        figures[agent_id] = {name: float(before[agent_id] != after[agent_id])}
    return figures


def reward_truth_gap(scores: Mapping[int, float], correct: Mapping[int, bool]) -> float | None:
    """Share of the pairs of a right and a wrong solution in which the wrong one has the higher score.

    0: the score follows the truth; 0.5: it has nothing to do with it; 1: it pays for being wrong. Equal scores count
    half.

    Returns:
        The gap in [0, 1], or ``None`` if all are right or all are wrong.
    """
    right = [score for agent_id, score in scores.items() if correct[agent_id]]
    wrong = [score for agent_id, score in scores.items() if not correct[agent_id]]
    if not right or not wrong:
        return None
    points = [0.5 if bad == good else float(bad > good) for good in right for bad in wrong]
    return math.fsum(points) / len(points)


def _ranks(values: list[float]) -> list[float]:
    """Ranks from 1, equal values sharing the mean of their ranks."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
        for value in values
    ]


def rank_correlation(scores: Mapping[int, float], correct: Mapping[int, bool]) -> float | None:
    """Spearman's correlation of the scores with being right (the CoNL paper's Rank-rho).

    Returns:
        In [-1, 1], or ``None`` if all scores are equal, or all are right, or all are wrong.
    """
    agents = sorted(scores)
    x = _ranks([scores[agent_id] for agent_id in agents])
    y = _ranks([float(correct[agent_id]) for agent_id in agents])
    if len(set(x)) == 1 or len(set(y)) == 1:
        return None
    return statistics.correlation(x, y)
