"""The conversation's own metrics on held-out prompts: nothing is trained on what these conversations say."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tinker_cookbook.rl.types import EnvGroupBuilder

from viva.judging.policy import SamplingClient
from viva.training.completer import Policy
from viva.training.metrics import rollout_metrics
from viva.training.progress import Begin, unseen
from viva.training.rollouts import GroupOutcome, run_groups
from viva.training.seeds import derive_seed

__all__ = ["ConversationEvaluator", "group_seed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationEvaluator:
    """Plays the same groups at every evaluation, with the same seeds, and reports the loop's rollout metrics."""

    make_builders: Callable[[], Sequence[EnvGroupBuilder]]
    """Fresh builders for one evaluation; their seeds come from `group_seed`."""
    seed: int
    max_tokens: int
    temperature: float = 1.0
    context_window: int | None = None
    policy_timeout_s: float | None = None
    max_retries: int = 1
    """How often a conversation that failed is played again."""
    prefix: str = "test/conversation/"
    begin: Begin = unseen
    """Is told that conversations begin."""

    def reporting(self, begin: Begin) -> "ConversationEvaluator":
        """The same evaluator, which tells how far it is."""
        return replace(self, begin=begin)

    async def __call__(self, sampler: SamplingClient, step: int) -> Mapping[str, float]:
        """Metrics with the prefix."""
        del step  # seeds are the same at every step
        return self.metrics(await self.play(sampler))

    async def play(self, sampler: SamplingClient) -> list[GroupOutcome]:
        """What became of every group, in the order of the builders."""
        builders = self.make_builders()
        progress = self.begin("test conversations", len(builders), "conversations")
        policy = Policy(
            sampler=sampler,
            seed=derive_seed(self.seed, "test conversations"),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            context_window=self.context_window,
            timeout_s=self.policy_timeout_s,
            on_reply=progress.on_reply,
        )
        return await run_groups(
            builders,
            policy,
            max_retries=self.max_retries,
            on_group=lambda _, outcome: progress.on_group(outcome),
        )

    def metrics(self, outcomes_P: Sequence[GroupOutcome]) -> dict[str, float]:
        """Rollout metrics of groups, with the prefix."""
        return {self.prefix + key: value for key, value in rollout_metrics(outcomes_P).items()}


def group_seed(seed: int, index: int) -> int:
    """The seed of the test conversation on the prompt at a place of the test set."""
    return derive_seed(seed, "test group", index)
