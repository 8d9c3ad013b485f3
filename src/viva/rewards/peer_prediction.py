"""The reward ``peer_prediction``: how much a reply helps to predict its peers (Qiu et al., 2026, arXiv 2601.20299).

A scorer q reads the question x and the replies y_1, ..., y_G, each alone:

    g_ij = 1/T_j ( log q(y_j | x, y_i) - log q(y_j | x) )        r_i = 1/(G-1) sum_{j != i} g_ij

Unlike the paper: means over the target's T_j tokens and not sums (a reward with a mean baseline needs a scale that does
not grow with length; the paper ranks replies, for DPO); no worked examples in the prompts; one expert, not a jury;
peers are samples of one policy. Its guarantee, that honesty is an equilibrium, needs peers who cannot see one another:
in a conversation, whoever repeats a neighbour is predicted by it. Replies that all say the same are paid alike.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from viva.judging.scorer import ScorerOptions
from viva.rewards.base import Models
from viva.rewards.solutions import SolutionReward, Solutions


@dataclass(frozen=True, kw_only=True)
class PeerPrediction(SolutionReward):
    """Mutual predictability of replies, by a scorer; needs no known answers."""

    predicted_by: ScorerOptions = field(default_factory=ScorerOptions)
    name: str = "peer_prediction"

    @property
    def scorer(self) -> ScorerOptions:
        """The scorer of the replies."""
        return self.predicted_by

    def scored_by(self, scorer: ScorerOptions) -> "PeerPrediction":
        """The same reward with another scorer."""
        return replace(self, predicted_by=scorer)

    async def ask(self, group: Solutions, question: str, models: Models) -> Solutions:
        """The gains of every reply behind every other one; a `ScorerError` if the engine cannot tell."""
        if models.scorer is None:
            raise ValueError(f"the reward {self.name!r} needs a scorer; got none")
        return replace(group, gains=await models.scorer.gains(question, group.by_id()))

    def pay(self, group: Solutions) -> list[float]:
        """Mean gains over the others, in nats per token; 0 for a lone reply."""
        gains = self.known(group.gains, "what a scorer says of the replies")
        return [math.fsum(gains[each].values()) / max(len(gains[each]), 1) for each in group.ids]


def peer_prediction(
    *, policy: Literal["current", "initial"] = "initial", model: str | None = None
) -> PeerPrediction:
    """Mutual predictability: a reply earns how much better a scorer predicts the others with it than without it.

    Args:
        policy: The scorer is the policy as it was at the start (``initial``), or the one being trained (``current``).
        model: Another model as scorer: a hub name, a folder, a GGUF file or ``tiny``.

    Raises:
        ValueError: If the policy is neither, or is ``current`` beside a model.
    """
    return PeerPrediction(predicted_by=ScorerOptions(policy=policy, model=model))
