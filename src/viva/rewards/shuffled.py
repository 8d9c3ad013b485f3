"""The reward ``shuffled``: any reward permuted within its group, the floor of all others.

    r'_i = r_pi(i),    pi a uniformly random permutation of the group, drawn from the run's seed

The rewards keep their distribution in every group, stream and round, and the expected advantage of every sample is 0. A
training that learns from them learns from something else.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinker_cookbook.rl.types import Metrics

from viva.conversation.protocol import Protocol
from viva.conversation.records import Conversation
from viva.judging.records import ConversationRecord
from viva.rewards.base import NO_MODELS, Models, Played, Reward, Scored
from viva.rewards.credit import GroupCredit
from viva.rewards.solutions import SolutionReward, Solutions


def permuted(values: Sequence[float], seed: int, stream: str = "") -> list[float]:
    """The values in an order that follows from the seed; streams of one seed have different orders."""
    order = list(values)
    random.Random(f"{seed}/shuffled/{stream}").shuffle(order)
    return order


@dataclass(frozen=True, kw_only=True)
class Shuffled(SolutionReward):
    """Another reward, permuted. Judge, checks and metrics are the other's, but for the metrics ``agent_N/reward``."""

    of: Reward
    name: str = "shuffled"

    @property
    def inner(self) -> Reward:
        """The other."""
        return self.of

    def around(self, reward: Reward) -> "Shuffled":
        """Another reward, shuffled."""
        return replace(self, of=reward)

    @property
    def pays_samples(self) -> bool:
        """As of the reward that is permuted."""
        return isinstance(self.of, SolutionReward) and self.of.pays_samples

    def check(self, protocol: Protocol, num_agents: int) -> None:
        """As of the reward that is permuted."""
        self.of.check(protocol, num_agents)

    def check_played(self, conversation: Conversation) -> None:
        """As of the reward that is permuted."""
        self.of.check_played(conversation)

    async def ask(self, group: Solutions, question: str, models: Models) -> Solutions:
        """As of the reward that is permuted."""
        return await self._of_samples.ask(group, question, models)

    def told(self, group: Solutions) -> dict[str, object]:
        """As of the reward that is permuted."""
        return self._of_samples.told(group)

    async def stored_pay(
        self, record: ConversationRecord, seed: int, models: Models = NO_MODELS
    ) -> dict[int, float]:
        """The other's, permuted."""
        own = await self.of.stored_pay(record, seed, models)
        return dict(zip(own, permuted(list(own.values()), seed), strict=True))

    def pay(self, group: Solutions) -> list[float]:
        """The other's, permuted."""
        return permuted(self._of_samples.pay(group), group.seed)

    def figures(self, group: Solutions) -> Metrics:
        """As of the reward that is permuted."""
        return self._of_samples.figures(group)

    @property
    def _of_samples(self) -> SolutionReward:
        if not isinstance(self.of, SolutionReward):
            raise ValueError(
                f"the reward {self.of.name!r} pays conversations; of samples or stored solutions shuffle answers, "
                "majority or log_probability"
            )
        return self.of

    async def score(self, played: Played) -> Scored:
        """Ask the other, then permute the rewards of agents, and those of spans within their stream and round.

        The transcript keeps what the other reward was in ``unshuffled``.
        """
        scored = await self.of.score(played)
        rewards: dict[tuple[int, int], float] = {}
        for lane in sorted({lane for _, lane in scored.rewards}):
            seats = sorted(seat for seat in scored.rewards if seat[1] == lane)
            values = permuted([scored.rewards[seat] for seat in seats], played.seed, f"lane {lane}")
            rewards |= dict(zip(seats, values, strict=True))
        agents = sorted({agent_id for agent_id, _ in rewards})
        totals = {
            agent_id: math.fsum(reward for seat, reward in rewards.items() if seat[0] == agent_id)
            for agent_id in agents
        }
        played.record["unshuffled"] = played.record.get("rewards", {})
        played.record["rewards"] = totals
        metrics = {
            agent_id: own | {f"agent_{agent_id}/reward": totals[agent_id]}
            for agent_id, own in scored.metrics.items()
        }
        credit = None if scored.credit is None else shuffled_credit(scored.credit, played.seed)
        return replace(scored, rewards=rewards, metrics=metrics, credit=credit)


def shuffled_credit(credit: GroupCredit, seed: int) -> GroupCredit:
    """The same spans, their rewards permuted within each stream and round."""
    spans = [
        replace(span, reward=reward)
        for (stream, round_index), own in credit.streams().items()
        for span, reward in zip(
            own, permuted([span.reward for span in own], seed, f"{stream} {round_index}"), strict=True
        )
    ]
    return replace(credit, spans=tuple(spans))
