"""Figures about ballots: can these voters be trusted, and with what do their votes go along?"""

import itertools
from collections.abc import Collection, Iterator, Mapping

from viva.judging.ballots import Ballots, Item, Preference, Tie, pooled
from viva.judging.consensus import majority

__all__ = ["ballot_health"]


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
