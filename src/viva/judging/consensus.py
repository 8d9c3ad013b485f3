"""What a group of voters agrees on, and how far each voter agrees with it.

The majority on a pair is the item with more than half of the votes on it, a tie giving half a vote to each: the
same half wins as in the Bradley-Terry fit. Where the halves are equal, there is no majority. Agreement is r_meta of
critique self-play, in one of two forms:

- *of all* (arXiv 2601.21464), literally ``(1 / |R_i|) * sum over (a, b) in R_i of 1[Pref_i(a, b) = Maj(a, b)]``. Every
  vote of the ballot ``R_i`` is in the denominator; the indicator is 1 for a vote that names whom the majority names,
  the voter's own vote included, and 0 for any other, also where there is no majority. The paper is silent about ties. A
  tie names nobody, so it is 0, too: if ties could agree with ties, calling everything a tie would earn all of r_meta.
- *of the others* (leave-one-out). The voter's own vote is no part of the majority that it is measured by. Pairs on
  which the others have none count for nobody, and a tie is worth 1/2 on the rest, neither more nor less than a guess.

A voter has no agreement, ``None``, if there is nothing to divide by: an empty ballot, or no pair that counts.
"""

from collections.abc import Iterable, Mapping, Sequence

from viva.judging.ballots import Ballots, Item, Preference, Vote, pair_of, pooled

__all__ = ["agreement", "majority"]

_Pair = frozenset[Item]
_PointsByPair = Mapping[_Pair, Mapping[Item, float]]


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
        leave_one_out: Whether a voter is measured by the majority of the others, on the pairs where they have one; if
            not, by that of all, on every pair that it voted on.

    Raises:
        ValueError: If a voter voted twice on a pair.
    """
    points = _points(pooled(ballots))
    return {
        voter: _with_the_others(votes, points) if leave_one_out else _with_all(votes, points)
        for voter, votes in ballots.items()
    }


def _with_all(votes: Sequence[Vote], points: _PointsByPair) -> float | None:
    preferred = _decided({pair_of(vote): points[pair_of(vote)] for vote in votes})
    hits = sum(preferred.get(pair_of(vote)) == vote for vote in votes)
    return hits / len(votes) if votes else None


def _with_the_others(votes: Sequence[Vote], points: _PointsByPair) -> float | None:
    own = _points(votes)
    preferred = _decided(
        {pair: {item: points[pair][item] - own[pair][item] for item in pair} for pair in own}
    )
    shares = [own[pair][preference.winner] for pair, preference in preferred.items()]
    return sum(shares) / len(shares) if shares else None


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


def _decided(points: _PointsByPair) -> dict[_Pair, Preference]:
    decided: dict[_Pair, Preference] = {}
    for pair, points_by_item in points.items():
        (one, high), (other, low) = points_by_item.items()
        if high != low:
            decided[pair] = Preference(one, other) if high > low else Preference(other, one)
    return decided
