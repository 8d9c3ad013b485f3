"""Verdicts of a conversation: pairs in both orders, flips, cycles, agreement with known answers; and sums of them.

An index looks at thousands of stored conversations through these functions, which read no texts.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from viva.judging.ballots import Item, Preference, majority, pooled
from viva.judging.records import ConversationRecord

_STAGES = {0: "initial", 1: "revised"}

Said = Iterable[tuple[int | None, int, int, str]]
"""(agent or ``None``, shown first, shown second, outcome) of comparisons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairVerdict:
    """Comparisons of one unordered pair."""

    agent_id: int | None
    """The agent whose initial (0) and revised (1) solutions were compared; ``None``: items are agents."""
    items: tuple[int, int]
    """The lower one first."""
    winners: tuple[tuple[int | None, ...], tuple[int | None, ...]]
    """Winners with the lower item shown first, then with the higher one; ``None``: a tie, or no readable reply."""

    @property
    def is_flipped(self) -> bool:
        """Whether the winner changes with the order in which the two were shown."""
        one, other = self._decided()
        return bool(one and other and one != other)

    @property
    def in_both_orders(self) -> bool:
        """Whether both orders have a verdict that names a winner."""
        return all(self._decided())

    @property
    def winner(self) -> int | None:
        """The more frequent winner; ``None`` if there is none."""
        return self._leader([*self.winners[0], *self.winners[1]])

    @property
    def labels(self) -> tuple[int | None, int | None]:
        """Verdict in each order: 0 what was shown first wins, 1 the other one, 2 neither; ``None``: not asked."""
        one, other = (
            (None if not said else 2 if (leader := self._leader(said)) is None else int(leader != first))
            for first, said in zip(self.items, self.winners, strict=True)
        )
        return one, other

    def _decided(self) -> list[set[int]]:
        return [{winner for winner in said if winner is not None} for said in self.winners]

    def _leader(self, winners: Sequence[int | None]) -> int | None:
        low, high = (winners.count(item) for item in self.items)
        return None if low == high else self.items[high > low]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """Cycles and agreement of comparisons, or of the votes of one segment."""

    segment: str | None
    """``None``: the judge's comparisons."""
    cycles: Sequence[tuple[Item, ...]]
    agreement: tuple[int, int]
    """Preferences between a right and a wrong solution: those that went to the right one, and all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCounts:
    """Counts of verdicts in some conversations, or in one."""

    conversations: int = 1
    pairs: int = 0
    """Judged in both orders, with a winner in each."""
    flips: int = 0
    """Number of these with two winners."""
    cycles: int = 0
    agreeing: int = 0
    """Preferences between a right and a wrong solution that went to the right one."""
    decidable: int = 0
    """Preferences between a right and a wrong solution."""
    orders: tuple[int, ...] = (0,) * 9
    """Pairs by their verdicts in both orders, see `orders_of`."""


NO_VERDICTS = JudgeCounts()


def judge_conversation(record: ConversationRecord) -> tuple[list[PairVerdict], list[Verdicts]]:
    """The pairs that the judge compared, and the verdicts: first the judge's, then those of every segment with votes.

    Raises `ValueError` if a voter voted twice on a pair, or an item is compared with itself.
    """
    before, after = record.correct_initial or {}, record.correct or {}
    pairs = judge_pairs(record.said())
    known = known_answers(before, after)
    verdicts = [
        Verdicts(
            segment=None, cycles=pair_cycles(pairs), agreement=agreement(preferred(record.said()), known)
        )
    ]
    for segment, ballots in record.ballots().items():
        votes = pooled(ballots)
        preferences = [(vote.winner, vote.loser) for vote in votes if isinstance(vote, Preference)]
        winners = {pair: vote.winner for pair, vote in majority(votes).items()}
        about: Mapping[Item, bool] = {**before} if segment == "ranking" else known
        verdicts.append(
            Verdicts(segment=segment, cycles=cycles(winners), agreement=agreement(preferences, about))
        )
    return pairs, verdicts


def count_verdicts(record: ConversationRecord) -> JudgeCounts:
    """The counts of one conversation; `ValueError` if a voter voted twice on a pair."""
    pairs, verdicts = judge_conversation(record)
    counts = JudgeCounts(
        pairs=sum(pair.in_both_orders for pair in pairs),
        flips=sum(pair.is_flipped for pair in pairs),
        cycles=sum(len(each.cycles) for each in verdicts),
        agreeing=sum(each.agreement[0] for each in verdicts),
        decidable=sum(each.agreement[1] for each in verdicts),
        orders=orders_of(pairs),
    )
    return NO_VERDICTS if counts == NO_VERDICTS else counts  # one value for all that have none


def sum_counts(counts: Iterable[JudgeCounts]) -> JudgeCounts:
    """Sums over some conversations."""
    known = list(counts)
    names = [field.name for field in fields(JudgeCounts) if field.name != "orders"]
    return JudgeCounts(
        **{name: sum(getattr(each, name) for each in known) for name in names},
        orders=tuple(map(sum, zip(NO_VERDICTS.orders, *(each.orders for each in known), strict=True))),
    )


def judge_pairs(said: Said) -> list[PairVerdict]:
    """Verdicts by pair, in order of (whose, items); `ValueError` if an item is compared with itself."""
    found: dict[tuple[int | None, int, int], tuple[list[int | None], list[int | None]]] = {}
    for agent_id, first, second, outcome in said:
        low, high = sorted((first, second))
        if low == high:
            raise ValueError(f"a comparison is of two different items; got {low} twice")
        winners = found.setdefault((agent_id, low, high), ([], []))
        winners[first != low].append({"A": first, "B": second}.get(outcome))
    return [
        PairVerdict(agent_id=agent_id, items=(low, high), winners=(tuple(one), tuple(other)))
        for (agent_id, low, high), (one, other) in sorted(
            found.items(), key=lambda pair: (-1 if pair[0][0] is None else pair[0][0], *pair[0][1:])
        )
    ]


def orders_of(pairs: Iterable[PairVerdict]) -> tuple[int, ...]:
    """Pairs counted by verdicts in their two orders: what is shown first wins, what is second, or neither.

    Of the nine counts, number ``3 * i + j`` is of pairs with verdict ``i`` when the lower item is shown first, and
    ``j`` when the higher one is. Wins by merit are 1 (0, 1) and 3 (1, 0); pairs that flip are 0 and 4.
    """
    counts = [0] * 9
    for pair in pairs:
        one, other = pair.labels
        if one is not None and other is not None:
            counts[3 * one + other] += 1
    return tuple(counts)


def pair_cycles(pairs: Iterable[PairVerdict]) -> list[tuple[Item, ...]]:
    """Triples of agents in which the judge prefers a to b, b to c and c to a."""
    agents = [pair for pair in pairs if pair.agent_id is None]
    return cycles({frozenset[Item](pair.items): pair.winner for pair in agents if pair.winner is not None})


def cycles(winners: Mapping[frozenset[Item], Item]) -> list[tuple[Item, ...]]:
    """Triples of items in which a wins against b, b against c and c against a, from the winner of every pair."""
    items = sorted({item for pair in winners for item in pair}, key=str)
    found: list[tuple[Item, ...]] = []
    for a, b, c in itertools.combinations(items, 3):
        beats = [winners.get(frozenset(pair)) for pair in ((a, b), (b, c), (c, a))]
        if beats == [a, b, c]:
            found.append((a, b, c))
        elif beats == [b, c, a]:
            found.append((a, c, b))
    return found


def agreement(preferences: Iterable[tuple[Item, Item]], is_right: Mapping[Item, bool]) -> tuple[int, int]:
    """Preferences, as (winner, loser), between a right and a wrong item: those for the right one, and all."""
    hits = [
        is_right[winner]
        for winner, loser in preferences
        if winner in is_right and loser in is_right and is_right[winner] != is_right[loser]
    ]
    return sum(hits), len(hits)


def preferred(said: Said) -> Iterator[tuple[Item, Item]]:
    """(winner, loser) of every comparison that has a winner: agents, or initial and revised solution of one agent."""
    for agent, *pair, outcome in said:
        one, other = (item if agent is None else (_STAGES.get(item, ""), agent) for item in pair)
        if outcome in ("A", "B"):
            yield (one, other) if outcome == "A" else (other, one)


def known_answers(before: Mapping[int, bool], after: Mapping[int, bool]) -> dict[Item, bool]:
    """Correctness of items: initial and revised solutions, and agents by their last one."""
    stages = zip(_STAGES.values(), (before, after), strict=True)
    staged: dict[Item, bool] = {
        (stage, agent): right for stage, known in stages for agent, right in known.items()
    }
    return {**after, **staged}
