"""Controls: a conversation with its content taken away, so that a gain can be put down to what was said.

    foreign_critiques    agents read critiques of another problem, written in another conversation of the same batch
    shuffled_critiques   agents read critiques of this conversation that were written for somebody else
    no_critiques         nobody is asked for critiques
    no_exchange          what an agent solves with shows nothing of the others; votes, critiques and rewards stay

In the first two only what is read where critiques are read differs. A foreign critique comes from a conversation of the
same batch: it costs no sampling and is as old as one's own; its reader waits until that conversation's critics are
done, who wait for nobody. A critique's tokens earn what the target that it was written for gains.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase

from viva.conversation.coordinator import view_of
from viva.conversation.protocol import Control, Protocol, Round, Segment, Sight, View
from viva.conversation.records import Critique, CritiqueReply, Reply, ReplyStatus, Turn
from viva.judging.ranking import RankingReply

DEALT = ("foreign_critiques", "shuffled_critiques")
"""Controls in which agents read other critiques than those of their solutions."""


def controlled(protocol: Protocol, control: Control, num_agents: int) -> Protocol:
    """The protocol with its content taken away in one of the ways above.

    Raises:
        ValueError: If the control would change nothing, or cannot be had.
    """
    protocol.check()
    if control == "no_exchange":
        changed = _without_exchange(protocol, num_agents)
        if [each.sights for each in changed.rounds] == [each.sights for each in protocol.rounds]:
            raise ValueError(
                f"control=no_exchange would change nothing: in protocol {protocol.name!r} agents that solve see "
                "nothing of others; leave it out"
            )
    else:
        changed = _checked_critiques(protocol, control, num_agents)
    changed = replace(changed, control=control)
    changed.check()
    return changed


def _checked_critiques(protocol: Protocol, control: Control, num_agents: int) -> Protocol:
    written = _segments(protocol, num_agents, CritiqueReply)
    sights = [sight for each in protocol.rounds for sight in each.sights if written & set(sight.segments)]
    if not sights or any(sight.whose != "addressed" for sight in sights):
        raise ValueError(
            f"control={control} needs critiques that only those they address are shown, and protocol {protocol.name!r} "
            "has none; use control=no_exchange, or the recipe critique_self_play"
        )
    if control == "no_critiques":
        return _without_critiques(protocol, written)
    if control == "shuffled_critiques" and num_agents < 3:
        raise ValueError(
            f"control={control} needs num_agents=3 or more: of two agents, a critique of one can only be dealt to the "
            f"critic; got {num_agents}"
        )
    return protocol


def _segments(protocol: Protocol, num_agents: int, *replies: type[Reply]) -> set[str]:
    """Names of the segments whose readers make such replies of what is asked for."""
    return {
        segment.name
        for index, round_ in enumerate(protocol.rounds)
        for segment in round_.segments
        if (segment.votes_on is not None and RankingReply in replies)
        or isinstance(_read(segment, view_of(protocol, num_agents, range(num_agents), 0, index, "")), replies)
    }


def _read(segment: Segment, view: View) -> Reply:
    return segment.read(scripted_reply(segment, view), view).response


def scripted_reply(segment: Segment, view: View) -> str:
    """A reply that the segment's reader reads best, of a few texts, JSON objects, rankings and critiques."""
    ranks = {ReplyStatus.OK: 0, ReplyStatus.REPAIRED: 1, ReplyStatus.UNSTRUCTURED: 2}
    return min(_candidates(view), key=lambda text: ranks[segment.read(text, view).status])


def _candidates(view: View) -> Iterator[str]:
    solution = f"Agent {view.agent_id} in round {view.round_index + 1}: 4."
    yield solution
    yield f"Revise: {solution}"
    yield f'{{"reflection": "I counted.", "evaluation": "Fine.", "solution": "{solution}"}}'
    letters = ascii_uppercase[: len(view.aliases)]
    others = [letter for letter in letters if view.letters[letter] != view.agent_id]
    yield "\n".join(f"Critique of {letter}: check the sum." for letter in others)
    for ranked in (list(letters), others, ["A", "B"]):
        yield f"Ranking: {' > '.join(ranked)}"


def _without_critiques(protocol: Protocol, written: set[str]) -> Protocol:
    rounds: list[Round] = []
    for each in protocol.rounds:
        segments = [segment for segment in each.segments if segment.name not in written]
        sights = [_narrowed(sight, set(sight.segments) - written) for sight in each.sights]
        if segments:
            rounds.append(
                replace(each, segments=segments, sights=[sight for sight in sights if sight.segments])
            )
    return replace(protocol, rounds=tuple(rounds))


def _without_exchange(protocol: Protocol, num_agents: int) -> Protocol:
    """Rounds that vote or criticise stay; all others see the agent's own earlier turns that did neither."""
    about_others = _segments(protocol, num_agents, RankingReply, CritiqueReply)
    rounds: list[Round] = []
    earlier: set[str] = set()
    for each in protocol.rounds:
        names = {segment.name for segment in each.segments}
        sights = each.sights
        if not names & about_others:
            own = (_narrowed(sight, earlier & set(sight.segments), own=True) for sight in sights)
            sights = tuple(sight for sight in own if sight.segments)
        rounds.append(replace(each, sights=sights))
        earlier |= names - about_others
    return replace(protocol, rounds=tuple(rounds))


def _narrowed(sight: Sight, segments: set[str], *, own: bool = False) -> Sight:
    names = tuple(name for name in sight.segments if name in segments)
    return replace(sight, segments=names, whose="own" if own else sight.whose)


def reads_critiques(round_: Round) -> bool:
    """Whether agents are shown critiques of themselves in a round."""
    return any(sight.whose == "addressed" for sight in round_.sights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """A critique and who is shown it."""

    reader: int
    critic: int
    target: int
    """The agent that it was written for; of the other conversation, if it is from there."""
    text: str


_Slot = tuple[int, int]
"""Place of a turn, and of a critique in it."""


def shuffled(turns: Sequence[Turn], num_agents: int, seed: str) -> dict[_Slot, Dealt]:
    """Every critic's critiques, dealt around among its targets so that nobody is shown one of itself.

    Each agent is shown as many as were written for it, by the same critics. A critic's only critique is dealt to an
    agent that is neither critic nor target; only then do the numbers change.

    There must be at least 3 agents.
    """
    dealt: dict[_Slot, Dealt] = {}
    for place, turn in enumerate(turns):
        if not isinstance(turn.response, CritiqueReply):
            continue
        critiques = turn.response.critiques
        rng = random.Random(f"shuffled critiques/{seed}/{turn.round_index}/{turn.agent_id}")
        order = list(range(len(critiques)))
        rng.shuffle(order)
        reader_of = {
            index: critiques[after].target for index, after in zip(order, order[1:] + order[:1], strict=True)
        }
        if len(critiques) == 1:
            taken = (turn.agent_id, critiques[0].target)
            reader_of = {0: rng.choice([agent for agent in range(num_agents) if agent not in taken])}
        for index, critique in enumerate(critiques):
            dealt[place, index] = Dealt(
                reader=reader_of[index], critic=turn.agent_id, target=critique.target, text=critique.text
            )
    return dealt


def foreign(turns: Sequence[Turn], others: Sequence[Turn]) -> dict[_Slot, Dealt]:
    """In the place of every critique one of another conversation.

    The critique by the same critic of the same agent in the same round, if there is one, else any: the one that was
    dealt least often, the first of these. So each agent is shown as many as were written for it and none twice, unless
    the other conversation has fewer.
    """
    slots, there = _slots(turns), _slots(others)
    known = {key: slot for slot, (key, _) in there.items()}
    chosen = {slot: known[key] for slot, (key, _) in slots.items() if key in known}
    times = Counter(chosen.values())
    for slot, (_, critique) in slots.items():
        shown = {
            chosen[each]
            for each, (_, own) in slots.items()
            if each in chosen and own.target == critique.target
        }
        left = [each for each in there if each not in shown]
        if slot not in chosen and left:
            chosen[slot] = min(left, key=lambda each: (times[each], each))
            times[chosen[slot]] += 1
    dealt: dict[_Slot, Dealt] = {}
    for slot in sorted(chosen):
        (_, critic, target), critique = there[chosen[slot]]
        dealt[slot] = Dealt(reader=slots[slot][1].target, critic=critic, target=target, text=critique.text)
    return dealt


def _slots(turns: Sequence[Turn]) -> dict[_Slot, tuple[tuple[int, int, int], Critique]]:
    """All critiques, with round, critic and target."""
    return {
        (place, index): ((turn.round_index, turn.agent_id, critique.target), critique)
        for place, turn in enumerate(turns)
        if isinstance(turn.response, CritiqueReply)
        for index, critique in enumerate(turn.response.critiques)
    }


def as_read(turns: Sequence[Turn], dealt: Mapping[_Slot, Dealt]) -> list[Turn]:
    """The turns as if every critique had been written for its reader, and nothing beside what is dealt."""
    read: list[Turn] = []
    for place, turn in enumerate(turns):
        if isinstance(turn.response, CritiqueReply):
            own = [dealt[slot] for slot in sorted(dealt) if slot[0] == place]
            critiques = tuple(Critique(target=each.reader, text=each.text, start=0, stop=0) for each in own)
            response = CritiqueReply(critiques=critiques, dropped={})
            turn = replace(turn, text="\n\n".join(each.text for each in own), response=response)
        read.append(turn)
    return read


class CritiqueBoard:
    """Critiques of one conversation, put up for another one to read; closed when it is over for good.

    Without a question there will be none on it.
    """

    def __init__(self, question: str | None) -> None:
        self.question = question
        self._is_closed = False
        self._turns_R: dict[int, asyncio.Future[tuple[Turn, ...]]] = {}

    @classmethod
    def empty(cls) -> "CritiqueBoard":
        """A board of no conversation."""
        board = cls(None)
        board.close()
        return board

    def put_up(self, round_index: int, turns: Sequence[Turn]) -> None:
        """Store the turns before a round in which critiques are read; of several attempts the first one counts."""
        if not (found := self._turns(round_index)).done():
            found.set_result(tuple(turns))

    async def read(self, round_index: int) -> tuple[Turn, ...]:
        """Wait for what was said before that round; nothing, if the conversation ends before it."""
        return await asyncio.shield(self._turns(round_index))

    def close(self) -> None:
        """Nothing more will be put up."""
        self._is_closed = True
        for waiting in self._turns_R.values():
            if not waiting.done():
                waiting.set_result(())

    def _turns(self, round_index: int) -> asyncio.Future[tuple[Turn, ...]]:
        if round_index not in self._turns_R:
            future: asyncio.Future[tuple[Turn, ...]] = asyncio.get_running_loop().create_future()
            if self._is_closed:
                future.set_result(())
            self._turns_R[round_index] = future
        return self._turns_R[round_index]
