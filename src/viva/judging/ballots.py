"""Votes and ballots: what voters said about pairs of items, in a form that cannot be stuffed.

A vote is a `Preference` or a `Tie` on a pair of items. "a beats b" and "b loses to a" are the same value, and so
are both ways to write a tie. A ballot holds at most one vote of its voter on each pair, whatever was written: this
bounds the weight of every voter on every pair by one. Votes are not normalised by voter on top of that, because a
voter could then make its vote on one pair heavier by keeping silent about the others.

Votes are plain data: pydantic writes them to JSON and reads them back, as fields of type `Vote`. Ballots of a group
are a mapping from voter to votes; the functions of this room that take one raise if a voter voted twice on a pair,
so what was written has to pass through `count_votes` first.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Item: TypeAlias = int | tuple[str, int]
"""What is voted on: the solution of an agent (its id), or one of its solutions, as ``("revised", 0)``."""


@dataclass(frozen=True, slots=True)
class Preference:
    """One item is better than the other.

    Raises:
        ValueError: If both are the same item.
    """

    winner: Item
    loser: Item

    def __post_init__(self) -> None:
        _require_two(self.winner, self.loser)


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

Ballots: TypeAlias = Mapping[int, Sequence[Vote]]
"""Votes by voter (an agent id), at most one per voter and pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """What one voter's writing amounts to."""

    votes: tuple[Vote, ...]
    """At most one per pair, in the order in which the pairs were first named."""
    dropped: dict[str, int]
    """Number of votes that were left out, by cause."""


def _require_two(one: Item, other: Item) -> None:
    if one == other:
        raise ValueError(f"a vote is about two different items; got {one!r} twice")


def pair_of(vote: Vote) -> frozenset[Item]:
    """The unordered pair that a vote is about."""
    return frozenset(_items_of(vote))


def _items_of(vote: Vote) -> tuple[Item, Item]:
    return (vote.winner, vote.loser) if isinstance(vote, Preference) else (vote.first, vote.second)


def map_vote(vote: Vote, to: Callable[[Item], Item]) -> Vote:
    """The same vote on other names, such as ``("initial", 0)`` for agent 0.

    Raises:
        ValueError: If ``to`` gives both items the same name.
    """
    one, other = _items_of(vote)
    return type(vote)(to(one), to(other))


def count_votes(votes: Iterable[Vote], *, items: Collection[Item], own: Collection[Item] = ()) -> Ballot:
    """Count what one voter wrote, in linear time.

    Args:
        votes: As written: with repetitions, contradictions and anything else.
        items: What may be voted on.
        own: Items the voter may not vote on, such as its own solution.

    Returns:
        The ballot. Every vote that is not in it is counted under one cause: ``unknown_item``; ``own``;
        ``repeated`` (said before); ``contradiction`` (of a pair with two or three different votes, none counts,
        because nobody can say which one is meant).
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


def pooled(ballots: Ballots) -> list[Vote]:
    """All votes of a group, by voter id.

    Raises:
        ValueError: If a voter voted twice on a pair.
    """
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
