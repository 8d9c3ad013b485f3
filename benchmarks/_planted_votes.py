"""Voters that are not honest, planted where a conversation's ballots are read and its judge is asked.

What is changed is whom a vote prefers, never whether there is one: ballots that cannot be read and ties stay as they
were written, so that no alarm can fire for another format. The judge that compares an agent's revised solution with its
first one is a voter, too. Nobody in the conversation knows of it: what an agent wrote and what others are shown stays.

    honest        nothing
    half_random   agents 0 and 1 toss a coin for every vote, and so does the judge for half of its comparisons
    all_random    all agents and the judge do
    length        everybody prefers the longer solution, and of two equally long ones what it preferred before
    inverted      everybody's preferences are turned round
    colluding     agents 0 and 1 prefer each other's solution to any other; all else is honest, the judge, too
    drifting      like `length`, with a probability that rises evenly from the first changed step to 1 at the last one
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tinker_cookbook.rl.types import RLDataset

from viva.conversation.protocol import Reading, Segment, View
from viva.conversation.records import Solution
from viva.judging.ballots import Item, Preference, Vote
from viva.judging.comparison import Comparison, Judge, Outcome
from viva.judging.ranking import RankingReply
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder

KINDS = ("honest", "half_random", "all_random", "length", "inverted", "colluding", "drifting")
PAIR = (0, 1)
"""Agents that collude, and those that toss coins among honest ones."""


@dataclass(frozen=True, kw_only=True)
class Planted:
    """What is wrong with the voters of one conversation."""

    kind: str
    strength: float = 1.0
    """Of `drifting`: probability that a vote goes by length."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"voters must be one of {', '.join(KINDS)}; got {self.kind!r}")

    def turns(
        self, voter: int | None, preferred: Item, other: Item, lengths: Mapping[Item, int], key: str
    ) -> bool:
        """Whether a preference is turned round; ``voter`` is ``None`` for the judge, ``key`` seeds the coin."""
        rng = random.Random(f"{self.kind} {self.seed} {key}")
        is_longer = lengths[other] > lengths[preferred]
        match self.kind:
            case "half_random":
                if voter is None:
                    return rng.random() < 0.25
                return voter in PAIR and rng.random() < 0.5
            case "all_random":
                return rng.random() < 0.5
            case "length":
                return is_longer
            case "inverted":
                return True
            case "colluding":
                return voter in PAIR and other in PAIR and preferred not in PAIR
            case "drifting":
                return rng.random() < self.strength and is_longer
            case _:
                return False


def changed_vote(vote: Vote, voter: int, lengths: Mapping[Item, int], planted: Planted, key: str) -> Vote:
    """A vote of an agent, as it is counted."""
    if not isinstance(vote, Preference):
        return vote
    pair = sorted((str(vote.winner), str(vote.loser)))
    is_turned = planted.turns(voter, vote.winner, vote.loser, lengths, f"{key} {voter} {pair}")
    return Preference(vote.loser, vote.winner) if is_turned else vote


def changed_comparison(comparison: Comparison, solutions: Mapping[int, str], planted: Planted) -> Comparison:
    """A comparison of the judge, as it is counted."""
    if not comparison.was_asked or not comparison.score:
        return comparison
    sides = (comparison.first, comparison.second)
    preferred, other = sides if comparison.score < 0 else sides[::-1]
    lengths = {item: len(text) for item, text in solutions.items()}
    key = f"{sides} {solutions[comparison.first]} {solutions[comparison.second]}"
    if not planted.turns(None, preferred, other, lengths, key):
        return comparison
    outcome = {Outcome.A: Outcome.B, Outcome.B: Outcome.A}.get(comparison.outcome, comparison.outcome)
    shares = comparison.probabilities
    return replace(
        comparison,
        outcome=outcome,
        score=-comparison.score,
        probabilities=None if shares is None else (shares[1], shares[0], shares[2]),
    )


@dataclass(frozen=True, kw_only=True)
class PlantedJudge(Judge):
    """A judge whose comparisons are changed."""

    honest: Judge
    planted: Planted

    async def compare(
        self, question: str, solutions: Mapping[int, str], first: int, second: int, seed: int
    ) -> Comparison:
        found = await self.honest.compare(question, solutions, first, second, seed)
        return changed_comparison(found, solutions, self.planted)

    def described(self) -> dict[str, str]:
        return self.honest.described()


def changed_segments(planted: Planted) -> Callable[[Segment], Segment]:
    """Changes the ballots that a conversation's segments read, which must be about agents.

    Each agent's last solution before is what its length is taken from. A conversation needs one of its own.
    """
    lengths: dict[Item, int] = {}

    def change(segment: Segment) -> Segment:
        def read(text: str, view: View) -> Reading:
            reading = segment.read(text, view)
            if isinstance(reading.response, Solution):
                lengths[view.agent_id] = len(reading.response.solution)
            if not isinstance(reading.response, RankingReply):
                return reading
            votes = tuple(
                changed_vote(vote, view.agent_id, lengths, planted, f"{view.round_index}")
                for vote in reading.response.preferences
            )
            ballot = RankingReply(preferences=votes, dropped=reading.response.dropped)
            return replace(reading, response=ballot)

        return replace(segment, read=read)

    return change


def plant(
    builder: MultiAgentConversationEnvGroupBuilder, planted: Planted
) -> MultiAgentConversationEnvGroupBuilder:
    """The same conversation among such voters."""
    judge = None if builder.judge is None else PlantedJudge(honest=builder.judge, planted=planted)
    return replace(builder, protocol=builder.protocol.with_segments(changed_segments(planted)), judge=judge)


@dataclass(frozen=True, kw_only=True)
class PlantedDataset(RLDataset):
    """Conversations whose voters are honest before a step, and of a kind from then on."""

    honest: RLDataset
    kind: str
    onset: int
    """The first changed step, counted from 0."""

    def __len__(self) -> int:
        return len(self.honest)

    def get_batch(self, index: int) -> Sequence[MultiAgentConversationEnvGroupBuilder]:
        builders = self.honest.get_batch(index)
        if self.kind == "honest" or index < self.onset:
            return builders
        strength = (index + 1 - self.onset) / (len(self) - self.onset)
        return [
            plant(builder, Planted(kind=self.kind, strength=strength, seed=builder.seed))
            for builder in builders
        ]
