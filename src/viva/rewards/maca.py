"""The reward ``maca``: multi-agent consensus alignment (Samanta et al., 2025, arXiv 2509.15172).

With ``a_i`` the answer of agent i's last solution and ``a*`` the one answer that most give, at least two of them,

    r_i = +1 if a_i = a*, else -1        on the tokens of agent i's last solution, and on no others

and all 0 where several answers have the most votes. A trace without an answer, or one that was cut, earns -1. This is
the reward of the paper's MV-GRPO (in the authors' code +2 and -1 beside a term for the format; under a mean baseline
only the difference counts, up to the learning rate); its losses MV-DPO, MV-KTO and MV-SFT are not here. The paper
trains the traces behind the bare question, here they are trained behind what the agent saw; ``math_efficiency
strategies=["conversation"]`` swaps the context.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinker_cookbook.rl.types import Metrics

from viva.conversation.protocol import Protocol
from viva.conversation.records import Solution, Turn
from viva.rewards.base import Played, Scored, reply_credit
from viva.rewards.majority import votes_of
from viva.rewards.solutions import SolutionReward, Solutions


@dataclass(frozen=True, kw_only=True)
class Maca(SolutionReward):
    """+1 for final traces in the majority of a debate, -1 for the others; needs no known answers."""

    name: str = "maca"

    @property
    def pays_samples(self) -> bool:
        """No: where nobody talked, this is ``majority``."""
        return False

    def check(self, protocol: Protocol, num_agents: int) -> None:
        """Refuse what is no debate: fewer than two agents, or nobody sees anything of the others."""
        super().check(protocol, num_agents)
        if not any(sight.whose != "own" for round_ in protocol.rounds for sight in round_.sights):
            raise ValueError(
                f"the reward {self.name!r} pays the traces of a debate, and in protocol {protocol.name!r} nobody sees "
                "what another says; give a round sights of the others, or use the reward majority"
            )

    def pay(self, group: Solutions) -> list[float]:
        """+1 and -1; all 0 without a consensus."""
        final_G, votes_G, labels = votes_of(group)
        if len(labels) != 1 or votes_G.count(*labels) < 2:
            return [0.0] * len(group)
        return [1.0 if answer in labels else -1.0 for answer in final_G]

    def figures(self, group: Solutions) -> Metrics:
        """Whether there is a consensus, and how many of the agents share it."""
        rewards = self.pay(group)
        share = rewards.count(1.0) / len(rewards)
        return {"maca/consensus": float(any(rewards)), **({"maca/share": share} if any(rewards) else {})}

    def credited(self, played: Played, rewards: Mapping[int, float]) -> Scored:
        """Each agent's reward on its last solution."""
        last = _last_solutions(played.conversation.turns)
        return Scored(
            rewards={(agent_id, 0): reward for agent_id, reward in rewards.items()},
            credit=reply_credit(
                played, lambda turn: rewards[turn.agent_id] if turn is last[turn.agent_id] else None
            ),
        )

    def earning(self, protocol: Protocol, turns: Sequence[Turn]) -> list[bool]:
        """Every agent's last solution."""
        last = _last_solutions(turns)
        return [turn is last.get(turn.agent_id) for turn in turns]


def _last_solutions(turns: Sequence[Turn]) -> dict[int, Turn]:
    return {turn.agent_id: turn for turn in turns if isinstance(turn.response, Solution)}


def maca() -> Maca:
    """Majority against minority traces of a debate (MACA): +1 and -1 on the agents' last solutions."""
    return Maca()
