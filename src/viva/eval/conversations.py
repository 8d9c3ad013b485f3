"""The conversation's own metrics on held-out prompts: nothing is trained on what these conversations say."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tinker_cookbook.rl.types import EnvGroupBuilder

from viva.judging.policy import SamplingClient
from viva.rl.completer import Policy
from viva.rl.metrics import rollout_metrics
from viva.rl.rollouts import run_groups
from viva.rl.seeds import derive_seed

__all__ = ["ConversationEvaluator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationEvaluator:
    """Plays the same groups at every evaluation, with the same seeds, and reports the loop's rollout metrics."""

    make_builders: Callable[[], Sequence[EnvGroupBuilder]]
    """Fresh builders for one evaluation."""
    seed: int
    max_tokens: int
    temperature: float = 1.0
    context_window: int | None = None
    policy_timeout_s: float | None = None
    max_retries: int = 1
    """How often a conversation that failed is played again."""
    prefix: str = "test/conversation/"

    async def __call__(self, sampler: SamplingClient, step: int) -> Mapping[str, float]:
        """Metrics with the prefix."""
        del step  # seeds are the same at every step
        policy = Policy(
            sampler=sampler,
            seed=derive_seed(self.seed, "test conversations"),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            context_window=self.context_window,
            timeout_s=self.policy_timeout_s,
        )
        outcomes = await run_groups(self.make_builders(), policy, max_retries=self.max_retries)
        return {self.prefix + key: value for key, value in rollout_metrics(outcomes).items()}
