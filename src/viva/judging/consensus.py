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

`ballot_health` has the figures about ballots: whether these voters can be trusted, and what their votes go along with.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from viva.judging.ballots import Ballots, Item, Preference, Tie, Vote, pair_of, pooled

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


def ballot_health(
    ballots: Ballots,
    *,
    forward: Collection[int] | None = None,
    own: Mapping[int, Item] | None = None,
    lengths: Mapping[Item, int] | None = None,
    unreadable: Collection[int] | None = None,
) -> dict[str, float]:
    """Figures about one group's votes on one round; those without anything to count are left out.

    - ``invalid_rate``: share of voters without a single vote that counts.
    - ``unreadable_rate``: share of voters who wrote something that ranks and could not be read.
    - ``tie_rate``: share of votes that are ties.
    - ``cyclic_triads``: share of triples of items, all three majorities decided, in which a beats b beats c beats a.
    - ``order_flips``: share of pairs, decided by both halves of the voters, whose winner changes with the order in
      which the items were shown.
    - ``self_preference``: share of the preferences about a voter's own item that it gave to its own.
    - ``length_preference``: share of the preferences between items of different length that went to the longer.

    Args:
        ballots: Votes by voter, also of voters whose ballot is empty.
        forward: Voters who saw the items in one order; all others saw them in reverse.
        own: Each voter's own item.
        lengths: Lengths of the items' texts, in any unit; votes on an item without one are left out of it.
        unreadable: Voters with a line that was dropped as unreadable.

    Raises:
        ValueError: If a voter voted twice on a pair.
    """
    votes = pooled(ballots)
    preferences = [
        (voter, vote) for voter in ballots for vote in ballots[voter] if isinstance(vote, Preference)
    ]
    counts: dict[str, list[bool]] = {
        "invalid_rate": [not ballots[voter] for voter in ballots],
        "tie_rate": [isinstance(vote, Tie) for vote in votes],
        "cyclic_triads": list(_cycles(ballots)),
    }
    if unreadable is not None:
        counts["unreadable_rate"] = [voter in unreadable for voter in ballots]
    if forward is not None:
        counts["order_flips"] = list(_order_flips(ballots, forward))
    if own is not None:
        counts["self_preference"] = [
            vote.winner == own[voter]
            for voter, vote in preferences
            if own.get(voter) in (vote.winner, vote.loser)
        ]
    if lengths is not None:
        counts["length_preference"] = [
            lengths[vote.winner] > lengths[vote.loser]
            for _, vote in preferences
            if vote.winner in lengths
            and vote.loser in lengths
            and lengths[vote.winner] != lengths[vote.loser]
        ]
    return {name: sum(hits) / len(hits) for name, hits in counts.items() if hits}


def _cycles(ballots: Ballots) -> Iterator[bool]:
    """Of every decided triple of items, whether it is a cycle: everybody beats one of the others."""
    decided = majority(pooled(ballots))
    items = dict.fromkeys(item for pair in decided for item in pair)
    for triple in itertools.combinations(items, 3):
        pairs = [frozenset(pair) for pair in itertools.combinations(triple, 2)]
        if all(pair in decided for pair in pairs):
            yield len({decided[pair].winner for pair in pairs}) == 3


def _order_flips(ballots: Ballots, forward: Collection[int]) -> Iterator[bool]:
    one = majority(pooled({voter: votes for voter, votes in ballots.items() if voter in forward}))
    other = majority(pooled({voter: votes for voter, votes in ballots.items() if voter not in forward}))
    for pair, preference in one.items():
        if pair in other:
            yield preference != other[pair]
