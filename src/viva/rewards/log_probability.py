"""The reward ``log_probability``: over the T_i sampled tokens of the reply that gives solution i, in nats.

    r_i = 1/T_i sum_t log q(y_(i,t) | x, y_(i,<t))

In the mean over samples this is minus the entropy per token, so it pays for low entropy, as do Prabhudesai et al., 2025
(arXiv 2505.22660). Self-certainty (Zhao et al., 2025, arXiv 2505.19590) compares whole distributions, which samplers do
not tell. It can only sharpen.
"""

import math
from dataclasses import dataclass

from viva.rewards.solutions import SolutionReward, Solutions


@dataclass(frozen=True, kw_only=True)
class LogProbability(SolutionReward):
    """The mean sampling log-probability of a reply's tokens."""

    name: str = "log_probability"

    @property
    def needs_logprobs(self) -> bool:
        """Yes: it is their mean."""
        return True

    def pay(self, group: Solutions) -> list[float]:
        """Mean logprobs; every reply needs a token."""
        if group.logprobs_G_T is None:
            raise ValueError(
                f"the reward {self.name!r} needs the sampling logprobs of the replies, which are not known here: "
                "transcripts hold none, and a run keeps them of one conversation of a strategy every tokens_every steps"
            )
        if not all(group.logprobs_G_T):
            raise ValueError(
                f"the reward {self.name!r} needs replies of at least one token; got an empty one"
            )
        return [math.fsum(logprobs_T) / len(logprobs_T) for logprobs_T in group.logprobs_G_T]


def log_probability() -> LogProbability:
    """The policy's own mean token log-probability as reward; needs no answers."""
    return LogProbability()
