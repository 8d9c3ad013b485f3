"""How scores and revisions relate to the truth, where answers are known: figures that never enter a reward."""

import math
import statistics
from collections.abc import Mapping

from viva.judging.ballots import Ballots, Preference, pooled

__all__ = ["ballot_accuracy", "flips", "rank_correlation", "reward_truth_gap"]


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
