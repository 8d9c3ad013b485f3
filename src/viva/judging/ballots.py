"""Votes and ballots: a group's votes on pairs of items, what its majority prefers, and how far voters agree with it.

A vote is a `Preference`, whole or divided (`SoftPreference`), or a `Tie`. "a beats b" and "b loses to a" are the same
value, and so are both ways to write a tie. A ballot holds at most one vote of its voter on each pair, whatever was
written, so that nobody can stuff it. Votes are not normalised by voter: silence on some pairs would make the other
votes heavier. Functions that take the ballots of a group raise if a voter voted
twice on a pair: pass what was written through `count_votes` first.

The majority on a pair is the item with more than half of the votes, a tie giving half a vote to each, as in the
Bradley-Terry fit; with equal halves there is none. `agreement` with it is r_meta of critique self-play, in two forms:

- *of all* (arXiv 2601.21464): ``(1 / |R_i|) * sum over (a, b) in R_i of 1[Pref_i(a, b) = Maj(a, b)]``. Every vote of
  the ballot ``R_i`` is in the denominator, and the voter's own vote is in the majority. A vote on a pair without a
  majority counts 0, and so does a tie, on which the paper is silent: else ties alone would earn all of it.
- *of the others* (leave-one-out). The voter's own vote is no part of the majority. Pairs on which the others have none
  do not count, and a tie is worth 1/2 on the rest, as much as a guess.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

Item: TypeAlias = int | tuple[str, int]
"""A thing that is voted on: the solution of an agent (its id), or one of its solutions, as ``("revised", 0)``."""


class Outcome(StrEnum):
    """Verdict of one comparison. Compare with ``is``; every member is truthy."""

    A = "A"
    """The solution shown first is better."""
    B = "B"
    """The solution shown second is better."""
    TIE = "Tie"
    INVALID = "invalid"
    """The judge's reply could not be read. Not a tie: it counts for nobody."""


@dataclass(frozen=True, slots=True)
class Preference:
    """One item is better than the other; a `ValueError` if both are the same item."""

    winner: Item
    loser: Item

    def __post_init__(self) -> None:
        _require_two(self.winner, self.loser)


@dataclass(frozen=True, slots=True)
class SoftPreference(Preference):
    """One item is better than the other to a degree: the vote is divided between them.

    Raises:
        ValueError: If the share is out of range, or both are the same item.
    """

    share: float
    """The winner's share of the vote: above 1/2 and at most 1. The loser has the rest."""

    def __post_init__(self) -> None:
        _require_two(self.winner, self.loser)
        if not 0.5 < self.share <= 1.0:
            raise ValueError(f"the winner's share must be above 1/2 and at most 1; got {self.share}")


@dataclass(frozen=True, slots=True, eq=False)
class Tie:
    """Two items are equally good; in which order they are given makes no difference.

    Raises:
        ValueError: If both are the same item.
    """

    first: Item
    second: Item

    def __post_init__(self) -> None:
        _require_two(self.first, self.second)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tie) and pair_of(self) == pair_of(other)

    def __hash__(self) -> int:
        return hash(pair_of(self))


Vote: TypeAlias = Preference | Tie

_Pair: TypeAlias = frozenset[Item]

Ballots: TypeAlias = Mapping[int, Sequence[Vote]]
"""Votes by voter (an agent id), at most one per voter and pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """One voter's preferences, as they count."""

    votes: tuple[Vote, ...]
    """At most one per pair, in the order in which the pairs were first named."""
    dropped: dict[str, int]
    """Number of votes that were left out, by cause."""


def _require_two(one: Item, other: Item) -> None:
    if one == other:
        raise ValueError(f"a vote is about two different items; got {one!r} twice")


_STEPS = 2**20
"""Shares of divided votes are multiples of 1/_STEPS, so that their sums are exact in whatever order they are added."""


def divided(one: Item, other: Item, share: float) -> Vote:
    """A vote of which the one item takes a share, from 0 to 1; a `Tie` where it is half."""
    lean = round((share - 0.5) * _STEPS) / _STEPS
    if not lean:
        return Tie(one, other)
    winner, loser = (one, other) if lean > 0 else (other, one)
    return SoftPreference(winner, loser, 0.5 + abs(lean))


def pair_of(vote: Vote) -> frozenset[Item]:
    """The unordered pair that a vote is about."""
    return frozenset(sides_of(vote))


def sides_of(vote: Vote) -> tuple[Item, Item]:
    """The two items that a vote is about, the winner of a preference first."""
    return (vote.winner, vote.loser) if isinstance(vote, Preference) else (vote.first, vote.second)


def sides_among(vote: Vote, agents: Collection[int]) -> tuple[int, int] | None:
    """The two agents that a vote is about, the winner first; ``None`` if one of its items is none of them."""
    one, other = sides_of(vote)
    if isinstance(one, int) and isinstance(other, int) and one in agents and other in agents:
        return one, other
    return None


def map_vote(vote: Vote, to: Callable[[Item], Item]) -> Vote:
    """The same vote on other names, such as ``("initial", 0)`` for agent 0.

    Raises:
        ValueError: If ``to`` gives both items the same name.
    """
    one, other = (to(item) for item in sides_of(vote))
    return (
        SoftPreference(one, other, vote.share) if isinstance(vote, SoftPreference) else type(vote)(one, other)
    )


def count_votes(votes: Iterable[Vote], *, items: Collection[Item], own: Collection[Item] = ()) -> Ballot:
    """Count what one voter wrote, in linear time.

    Args:
        votes: As written: with repetitions, contradictions and anything else.
        items: What may be voted on.
        own: Items the voter may not vote on, such as its own solution.

    Returns:
        The ballot, and in it the number of dropped votes by cause: ``unknown_item``, ``own``, ``repeated``, or
        ``contradiction`` (of a pair with several different votes none counts).
    """
    votes_by_pair: dict[frozenset[Item], dict[Vote, None]] = {}
    dropped: Counter[str] = Counter()
    for vote in votes:
        pair = pair_of(vote)
        if not all(item in items for item in pair):
            dropped["unknown_item"] += 1
        elif any(item in own for item in pair):
            dropped["own"] += 1
        elif vote in (said := votes_by_pair.setdefault(pair, {})):
            dropped["repeated"] += 1
        else:
            said[vote] = None
    kept: list[Vote] = []
    for said in votes_by_pair.values():
        if len(said) == 1:
            kept += said
        else:
            dropped["contradiction"] += len(said)
    return Ballot(votes=tuple(kept), dropped=dict(dropped))


def merged(votes: Sequence[Vote]) -> list[Vote]:
    """Divided votes of one voter on the same pair as one, of the mean share; other votes as they are."""
    if not any(isinstance(vote, SoftPreference) for vote in votes):
        return list(votes)
    votes_by_pair: dict[_Pair, list[Vote]] = {}
    for vote in votes:
        votes_by_pair.setdefault(pair_of(vote), []).append(vote)
    found: list[Vote] = []
    for own in votes_by_pair.values():
        one, other = sides_of(own[0])
        share = math.fsum(_share(vote, one) for vote in own) / len(own)
        found += own if len(own) == 1 else [divided(one, other, share)]
    return found


def pooled(ballots: Ballots) -> list[Vote]:
    """All votes of a group, by voter id."""
    votes: list[Vote] = []
    for voter in sorted(ballots):
        pairs = [pair_of(vote) for vote in ballots[voter]]
        if len(set(pairs)) < len(pairs):
            raise ValueError(
                f"a voter has one vote on each pair; voter {voter} has {len(pairs)} votes on {len(set(pairs))} "
                "pairs. Count what a voter wrote with count_votes."
            )
        votes += ballots[voter]
    return votes


_PointsByPair: TypeAlias = Mapping[_Pair, Mapping[Item, float]]


def majority(votes: Iterable[Vote]) -> dict[_Pair, Preference]:
    """The preferred item of every pair that has a majority, from the votes of all voters, in any order."""
    return _decided(_points(votes))


def agreement(ballots: Ballots, *, leave_one_out: bool) -> dict[int, float | None]:
    """Agreement of every voter with the majority of all, or of the others, in [0, 1]; see the module.

    ``None`` where there is nothing to divide by: an empty ballot, or no pair that counts.
    """
    points = _points(pooled(ballots))
    return {
        voter: _with_the_others(votes, points) if leave_one_out else _with_all(votes, points)
        for voter, votes in ballots.items()
    }


def _with_all(votes: Sequence[Vote], points: _PointsByPair) -> float | None:
    preferred = _decided({pair_of(vote): points[pair_of(vote)] for vote in votes})
    agreed = [
        isinstance(vote, Preference) and preferred.get(pair_of(vote)) == Preference(vote.winner, vote.loser)
        for vote in votes
    ]
    return sum(agreed) / len(agreed) if agreed else None


def _with_the_others(votes: Sequence[Vote], points: _PointsByPair) -> float | None:
    own = _points(votes)
    preferred = _decided(
        {pair: {item: points[pair][item] - own[pair][item] for item in pair} for pair in own}
    )
    shares = [own[pair][preference.winner] for pair, preference in preferred.items()]
    return sum(shares) / len(shares) if shares else None


def _points(votes: Iterable[Vote]) -> dict[_Pair, dict[Item, float]]:
    """Votes that each item of a pair got; sums of binary fractions, so exact."""
    points: dict[_Pair, dict[Item, float]] = {}
    for vote in votes:
        pair = pair_of(vote)
        so_far = points.setdefault(pair, dict.fromkeys(pair, 0.0))
        for item in pair:
            so_far[item] += _share(vote, item)
    return points


def _share(vote: Vote, item: Item) -> float:
    if isinstance(vote, Tie):
        return 0.5
    share = vote.share if isinstance(vote, SoftPreference) else 1.0
    return share if vote.winner == item else 1.0 - share


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
    forward: Collection[int],
    lengths: Mapping[Item, int],
    unreadable: Collection[int],
) -> dict[str, float]:
    """Figures about one group's votes on one round; those without anything to count are left out.

    - ``invalid_rate``: share of voters without a single vote that counts.
    - ``unreadable_rate``: share of voters who wrote something that ranks and could not be read.
    - ``tie_rate``: share of votes that are ties.
    - ``cyclic_triads``: share of triples of items, all three majorities decided, in which a beats b beats c beats a.
    - ``order_flips``: share of pairs, decided by both halves of the voters, whose winner changes with the order in
      which the items were shown.
    - ``self_preference``: share of the preferences about a voter's own item (its id) that it gave to its own.
    - ``length_preference``: share of the preferences between items of different length that went to the longer.

    Args:
        ballots: Votes by voter, also of voters whose ballot is empty.
        forward: Voters who saw the items in one order; all others saw them in reverse.
        lengths: Lengths of the items' texts; votes on an item without one are left out of it.
        unreadable: Voters with a line that was dropped as unreadable.
    """
    votes = pooled(ballots)
    preferences = [
        (voter, vote) for voter in ballots for vote in ballots[voter] if isinstance(vote, Preference)
    ]
    counts: dict[str, list[bool]] = {
        "invalid_rate": [not ballots[voter] for voter in ballots],
        "tie_rate": [isinstance(vote, Tie) for vote in votes],
        "cyclic_triads": list(_cycles(majority(votes))),
        "unreadable_rate": [voter in unreadable for voter in ballots],
        "order_flips": list(order_flips(ballots, forward)),
        "self_preference": [
            vote.winner == voter for voter, vote in preferences if voter in (vote.winner, vote.loser)
        ],
        "length_preference": [
            lengths[vote.winner] > lengths[vote.loser]
            for _, vote in preferences
            if {vote.winner, vote.loser} <= lengths.keys() and lengths[vote.winner] != lengths[vote.loser]
        ],
    }
    return {name: sum(hits) / len(hits) for name, hits in counts.items() if hits}


def _cycles(decided: Mapping[_Pair, Preference]) -> Iterator[bool]:
    """Whether each triple of items, all three pairs of them decided, is a cycle: everybody beats one of the others."""
    items = dict.fromkeys(item for pair in decided for item in pair)
    for triple in itertools.combinations(items, 3):
        pairs = [frozenset(pair) for pair in itertools.combinations(triple, 2)]
        if all(pair in decided for pair in pairs):
            yield len({decided[pair].winner for pair in pairs}) == 3


def order_flips(ballots: Ballots, forward: Collection[int]) -> Iterator[bool]:
    """For each pair that both halves of the voters decide, whether they prefer different items; see `ballot_health`."""
    one = majority(pooled({voter: votes for voter, votes in ballots.items() if voter in forward}))
    other = majority(pooled({voter: votes for voter, votes in ballots.items() if voter not in forward}))
    for pair, preference in one.items():
        if pair in other:
            yield preference != other[pair]


def ballot_accuracy(ballots: Ballots, correct: Mapping[int, bool]) -> float | None:
    """Share of the votes on a right and a wrong solution that prefer the right one, a tie counting half.

    ``None`` if there is no such vote. Votes on anything but agent ids are left out.
    """
    points: list[float] = []
    for vote in pooled(ballots):
        pair = sides_among(vote, correct)
        if pair is not None and correct[pair[0]] != correct[pair[1]]:
            points.append(float(correct[pair[0]]) if isinstance(vote, Preference) else 0.5)
    return math.fsum(points) / len(points) if points else None


def mutual_votes(ballots: Ballots) -> float | None:
    """Favour of voters for those who favour them, beyond what the others' votes explain.

    With ``d_ij`` the mean, over the pairs with j's item on i's ballot, of i's vote for it (1, 1/2, 0) less the mean
    vote that everybody but i and j gave it on the same pair::

        mutual = mean over {i, j} of d_ij * d_ji

    the covariance form of a network's reciprocity (Garlaschelli and Loffredo, 2004), in [-1, 1]. About 0 if voters err
    independently; 1/8 if two of four always vote for each other and against the rest, whose votes are even. ``None`` if
    no two voters could have favoured each other. Items go by the ids of voters.
    """
    points_by_voter = {voter: _points(votes) for voter, votes in ballots.items()}
    total = _points(pooled(ballots))
    favours: dict[tuple[int, int], float] = {}
    for voter, own in points_by_voter.items():
        for item in points_by_voter.keys() - {voter}:
            excess: list[float] = []
            for pair in own:
                if item not in pair:
                    continue
                favoured = points_by_voter[item].get(pair, {})
                rest = [
                    total[pair][each] - own[pair][each] - favoured.get(each, 0.0)
                    for each in (item, *(pair - {item}))
                ]
                if (count := sum(rest)) > 0:
                    excess.append(own[pair][item] - rest[0] / count)
            if excess:
                favours[voter, item] = math.fsum(excess) / len(excess)
    products = [
        favour * favours[item, voter]
        for (voter, item), favour in sorted(favours.items())
        if voter < item and (item, voter) in favours
    ]
    return math.fsum(products) / len(products) if products else None
