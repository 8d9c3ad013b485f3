"""What the verdicts of one conversation amount to: pairs in both orders, flips, cycles, agreement with known answers.

Plain values in, plain values out, so that an index can look at thousands of stored conversations without reading their
texts.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from viva.judging.ballots import Ballots, Item, Preference, Vote, pooled
from viva.judging.consensus import majority
from viva.judging.records import ConversationRecord

NO_ORDERS = (0,) * 9
"""`orders_of` no pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairVerdict:
    """All that a judge said about one unordered pair."""

    agent_id: int | None
    """Whose two solutions were compared, 0 the initial and 1 the revised one; ``None``: items are agents."""
    items: tuple[int, int]
    """The lower one first."""
    winners: tuple[int | None, ...]
    """Of every comparison, in the order of the file; ``None`` for a tie or a reply that could not be read."""
    orders: tuple[int, ...]
    """What was shown first in each of them."""

    @property
    def is_flipped(self) -> bool:
        """Whether the winner changes with the order in which the two were shown."""
        by_order = {first: set[int]() for first in self.items}
        for first, winner in zip(self.orders, self.winners, strict=True):
            if winner is not None and first in by_order:
                by_order[first].add(winner)
        one, other = by_order.values()
        return bool(one and other and one != other)

    @property
    def in_both_orders(self) -> bool:
        """Whether both orders have a verdict that names a winner."""
        decided = {f for f, winner in zip(self.orders, self.winners, strict=True) if winner is not None}
        return len(decided) == 2

    @property
    def winner(self) -> int | None:
        """Who won more often; ``None`` if nobody."""
        return self._leader(self.winners)

    def label(self, first: int) -> int | None:
        """What was said when an item was shown first: 0 it wins, 1 the other one, 2 neither; ``None`` if nothing."""
        said = [winner for shown, winner in zip(self.orders, self.winners, strict=True) if shown == first]
        if not said:
            return None
        leader = self._leader(said)
        return 2 if leader is None else int(leader != first)

    def _leader(self, winners: Sequence[int | None]) -> int | None:
        wins = [sum(winner == item for winner in winners) for item in self.items]
        return None if wins[0] == wins[1] else self.items[wins[1] > wins[0]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How often a preference between a right and a wrong solution went to the right one."""

    num_right: int
    num_pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingJudgement:
    """The votes of one segment."""

    ballots: Mapping[int, Sequence[Vote]]
    cycles: Sequence[tuple[Item, ...]]
    agreement: Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The judge's comparisons and the agents' rankings of one conversation."""

    pairs: Sequence[PairVerdict]
    cycles: Sequence[tuple[Item, ...]]
    agreement: Agreement
    rankings: Mapping[str, RankingJudgement]
    """By segment."""


def judge_conversation(record: ConversationRecord) -> Judgement:
    """All that the verdicts of a conversation amount to.

    Raises:
        ValueError: If a voter voted twice on a pair.
    """
    before, after = record.correct_initial or {}, record.correct or {}
    said = record.said()
    pairs = judge_pairs(said)
    return Judgement(
        pairs=pairs,
        cycles=pair_cycles(pairs),
        agreement=agreement_of_comparisons(said, before, after),
        rankings={
            segment: RankingJudgement(
                ballots=ballots,
                cycles=cycles_of_ballots(ballots),
                agreement=agreement_of_votes(
                    preferences_of([vote for votes in ballots.values() for vote in votes]),
                    _known_answers(before, after, segment),
                ),
            )
            for segment, ballots in record.ballots().items()
        },
    )


def _known_answers(before: Mapping[int, bool], after: Mapping[int, bool], segment: str) -> dict[Item, bool]:
    """Which of the items that a segment's votes are about are right, where that is known."""
    if segment == "comparison":
        stages = {"initial": before, "revised": after}
        return {(stage, agent): right for stage, known in stages.items() for agent, right in known.items()}
    about = before if segment == "ranking" else after
    return {**about}


def judge_pairs(comparisons: Iterable[tuple[int | None, int, int, str]]) -> list[PairVerdict]:
    """Verdicts by pair, in order of (whose, items).

    Args:
        comparisons: (agent or ``None``, shown first, shown second, outcome) of each.
    """
    found: dict[tuple[int | None, int, int], list[tuple[int, int | None]]] = {}
    for agent_id, first, second, outcome in comparisons:
        winner = {"A": first, "B": second}.get(outcome)
        key = (agent_id, min(first, second), max(first, second))
        found.setdefault(key, []).append((first, winner))
    return [
        PairVerdict(
            agent_id=agent_id,
            items=(low, high),
            winners=tuple(winner for _, winner in said),
            orders=tuple(first for first, _ in said),
        )
        for (agent_id, low, high), said in sorted(
            found.items(), key=lambda pair: (-1 if pair[0][0] is None else pair[0][0], *pair[0][1:])
        )
    ]


def orders_of(pairs: Iterable[PairVerdict]) -> tuple[int, ...]:
    """How many pairs have which verdicts in their two orders: what is shown first wins, what is second, or neither.

    Of the nine counts, number ``3 * i + j`` is of pairs with verdict ``i`` when the lower item is shown first, and
    ``j`` when the higher one is. Whoever wins by merit wins in both places: 1 (0, 1) and 3 (1, 0). Pairs that flip
    are 0 and 4.
    """
    counts = [0] * 9
    for pair in pairs:
        one, other = (pair.label(item) for item in pair.items)
        if one is not None and other is not None:
            counts[3 * one + other] += 1
    return tuple(counts)


def pair_cycles(pairs: Iterable[PairVerdict]) -> list[tuple[Item, ...]]:
    """Triples of agents in which the judge prefers a to b, b to c and c to a."""
    return _cycles(
        {
            frozenset[Item](pair.items): winner
            for pair in pairs
            if pair.agent_id is None and (winner := pair.winner) is not None
        }
    )


def cycles_of_ballots(ballots: Ballots) -> list[tuple[Item, ...]]:
    """Triples of items in which the majority prefers a to b, b to c and c to a.

    Raises:
        ValueError: If a voter voted twice on a pair.
    """
    return _cycles({pair: vote.winner for pair, vote in majority(pooled(ballots)).items()})


def _cycles(winners: Mapping[frozenset[Item], Item]) -> list[tuple[Item, ...]]:
    items = sorted({item for pair in winners for item in pair}, key=str)
    cycles: list[tuple[Item, ...]] = []
    for a, b, c in itertools.combinations(items, 3):
        beats = [winners.get(frozenset(pair)) for pair in ((a, b), (b, c), (c, a))]
        if beats == [a, b, c]:
            cycles.append((a, b, c))
        elif beats == [b, c, a]:
            cycles.append((a, c, b))
    return cycles


def agreement_of_votes(votes: Iterable[tuple[Item, Item]], is_right: Mapping[Item, bool]) -> Agreement:
    """Agreement of preferences with known answers.

    Args:
        votes: (winner, loser) of each.
        is_right: Of the items whose answer is known.
    """
    told = [
        is_right[winner]
        for winner, loser in votes
        if winner in is_right and loser in is_right and is_right[winner] != is_right[loser]
    ]
    return Agreement(num_right=sum(told), num_pairs=len(told))


def agreement_of_comparisons(
    said: Iterable[tuple[int | None, int, int, str]], before: Mapping[int, bool], after: Mapping[int, bool]
) -> Agreement:
    """Agreement of a judge's comparisons with known answers.

    Args:
        said: As `judge_pairs` takes them.
        before: Which agents' solutions were right before revision.
        after: And at the end.
    """
    num_right = num_pairs = 0
    for agent, first, second, outcome in said:
        if outcome not in ("A", "B"):
            continue
        known: dict[Item, bool] = {**after}
        if agent is not None:
            known = {0: before[agent], 1: after[agent]} if agent in before and agent in after else {}
        pair = (first, second) if outcome == "A" else (second, first)
        found = agreement_of_votes([pair], known)
        num_right, num_pairs = num_right + found.num_right, num_pairs + found.num_pairs
    return Agreement(num_right=num_right, num_pairs=num_pairs)


def preferences_of(votes: Sequence[object]) -> list[tuple[Item, Item]]:
    """The preferences among votes, as (winner, loser)."""
    return [(vote.winner, vote.loser) for vote in votes if isinstance(vote, Preference)]
