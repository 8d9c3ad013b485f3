"""What a group of voters agrees on, and how far each voter agrees with it.

The majority on a pair is the item with more than half of the votes on it, a tie giving half a vote to each: the
same half wins as in the Bradley-Terry fit. Where the halves are equal, there is no majority, and the pair counts for
nobody. A voter's agreement is the mean over its pairs that count: 1 if it prefers what the majority prefers, 0 if the
other, 1/2 if it says tie, so that a tie pays neither more nor less than a guess.

This is r_meta of critique self-play, (1 / |R_i|) * sum over (a, b) in R_i of 1[Pref_i(a, b) = Maj(a, b)], which
leaves ties open. There each voter's own vote is part of the majority, and a vote that nobody else cast on its pair
agrees with itself. Left out of it instead, a voter is measured by the others alone, and a pair on which nobody else
voted does not count.
"""

from collections.abc import Iterable, Mapping

from viva.judging.ballots import Ballots, Item, Preference, Vote, pair_of, pooled

__all__ = ["agreement", "majority"]

_Pair = frozenset[Item]


def majority(votes: Iterable[Vote]) -> dict[_Pair, Preference]:
    """What most of the votes prefer, for every pair on which there is such a thing.

    Args:
        votes: Of all voters, see `viva.judging.ballots.pooled`; their order makes no difference.
    """
    return _decided(_points(votes))


def agreement(ballots: Ballots, *, leave_one_out: bool) -> dict[int, float | None]:
    """How far every voter agrees with the majority, in [0, 1]; ``None`` if none of its pairs counts.

    Args:
        ballots: Votes by voter.
        leave_one_out: Whether a voter is measured by the majority of the others. If not, its own vote is inside.

    Raises:
        ValueError: If a voter voted twice on a pair.
    """
    points = _points(pooled(ballots))
    result: dict[int, float | None] = {}
    for voter, votes in ballots.items():
        own = _points(votes)
        if leave_one_out:
            others = {pair: {item: points[pair][item] - own[pair][item] for item in pair} for pair in own}
            decided = _decided(others)
        else:
            decided = _decided({pair: points[pair] for pair in own})
        shares = [own[pair][preference.winner] for pair, preference in decided.items()]
        result[voter] = sum(shares) / len(shares) if shares else None
    return result


def _points(votes: Iterable[Vote]) -> dict[_Pair, dict[Item, float]]:
    """Votes that each item of a pair got; sums of halves, so exact."""
    points: dict[_Pair, dict[Item, float]] = {}
    for vote in votes:
        pair = pair_of(vote)
        so_far = points.setdefault(pair, dict.fromkeys(pair, 0.0))
        for item in pair:
            so_far[item] += _share(vote, item)
    return points


def _share(vote: Vote, item: Item) -> float:
    if isinstance(vote, Preference):
        return float(vote.winner == item)
    return 0.5


def _decided(points: Mapping[_Pair, Mapping[Item, float]]) -> dict[_Pair, Preference]:
    decided: dict[_Pair, Preference] = {}
    for pair, points_by_item in points.items():
        (one, high), (other, low) = points_by_item.items()
        if high != low:
            decided[pair] = Preference(one, other) if high > low else Preference(other, one)
    return decided
