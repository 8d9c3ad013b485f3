"""One problem, one reply: right answers are paid, short right answers a little more.

With ``n`` sampled tokens, a budget of ``N`` tokens and a length weight ``a`` in [0, 1)::

    reward = 1[right and finished] * (1 - a * min(n / N, 1))

Correctness gates the length term, as in Arora and Zanette (2025, arXiv 2502.04463): every right reply earns more than
any wrong one, and a wrong one earns 0 however short it is. They scale lengths by the mean and deviation of a prompt's
right replies. The fixed scale here makes rewards of different strategies, batches and steps comparable, which union
baselines need, and bounds what brevity can cost: a right reply earns between 1 - a and 1, so a policy whose mean
reward has not fallen has kept at least the share 1 - a of its accuracy. Paying by the inverse of the length has no such
bound: a recipe that did so looked better on the replies that were finished, and had lost a third of its accuracy once
truncated ones were counted.

A truncated reply is wrong: whatever it says, it was not the policy that ended it. Its rate is a metric, ``truncated``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import tinker
from tinker_cookbook.renderers.base import Message, Renderer
from tinker_cookbook.rl.types import Action, ActionExtra, StepResult

from viva.conversation.rendering import read_reply
from viva.eval.answers import is_correct
from viva.experts.prompt_augmentation import PromptAugmentedEnv, leak

__all__ = ["DEFAULT_LENGTH_WEIGHT", "EfficientEnv", "EfficientReward", "Graded"]

DEFAULT_LENGTH_WEIGHT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """What a reply earns, and why."""

    reward: float
    metrics: dict[str, float]
    """``correct``, ``truncated``, and, if it is right, ``correct_tokens``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficientReward:
    """The reward of replies to one problem, see the module.

    Raises:
        ValueError: If the budget or the weight makes no sense.
    """

    answer: str
    """The known answer; GSM8K's worked solutions (``... #### 72``) are read as they are."""
    token_budget: int
    """N. Longer replies, where the sampler allows them, earn no less than one of N tokens."""
    length_weight: float = DEFAULT_LENGTH_WEIGHT
    """a; 0 pays for correctness alone."""

    def __post_init__(self) -> None:
        """Check."""
        if self.token_budget < 1:
            raise ValueError(f"token_budget must be 1 or more; got {self.token_budget}")
        if not 0 <= self.length_weight < 1:
            raise ValueError(
                f"length_weight must be 0 or more and below 1, or a right answer could earn nothing; "
                f"got {self.length_weight}"
            )

    def __call__(self, text: str, *, num_tokens: int, is_finished: bool) -> Graded:
        """Grade one reply.

        Args:
            text: What it says, without end-of-turn token and thinking.
            num_tokens: Tokens that were sampled, those of thinking and the end of the turn included.
            is_finished: Whether the policy ended it.
        """
        is_right = is_finished and is_correct(text, self.answer)
        share = min(num_tokens / self.token_budget, 1.0)
        metrics = {"correct": float(is_right), "truncated": float(not is_finished)}
        if is_right:
            metrics["correct_tokens"] = float(num_tokens)
        return Graded(reward=(1.0 - self.length_weight * share) if is_right else 0.0, metrics=metrics)


class EfficientEnv(PromptAugmentedEnv):
    """A problem asked once, behind a hint or without one, and always trained without it.

    Args:
        renderer: From `viva.conversation.rendering.load_renderer`.
        question: The problem.
        reward: Of its replies.
        sampling_convo_prefix: Messages before the question as it is sampled: the hint. None by default.
        leak_phrases: See `PromptAugmentedEnv`.
    """

    def __init__(
        self,
        renderer: Renderer,
        question: str,
        reward: EfficientReward,
        *,
        sampling_convo_prefix: Sequence[Message] = (),
        leak_phrases: Sequence[str] = (),
    ) -> None:
        super().__init__(renderer, list(sampling_convo_prefix), [], leak_phrases=leak_phrases)
        self.question = question
        self.reward = reward
        self.replied: tuple[str, Graded] | None = None
        """The reply's text and what it earned, once it was given."""

    def get_question(self) -> str:
        """The problem."""
        return self.question

    def check_answer(self, sample_str: str) -> bool:
        """Whether a text gives the known answer."""
        return is_correct(sample_str, self.reward.answer)

    def check_format(self, sample_str: str) -> bool:
        """Any form is allowed that the answer can be found in; what is paid is `EfficientReward`."""
        return True

    def get_reference_answer(self) -> str:
        """The known answer."""
        return self.reward.answer

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Grade the reply; the episode is over."""
        text, is_clean = read_reply(self.renderer, list(action))
        is_finished = is_clean and (extra or {}).get("stop_reason", "stop") == "stop"
        graded = self.reward(text, num_tokens=len(action), is_finished=is_finished)
        self.replied = text, graded
        return StepResult(
            reward=graded.reward,
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=self.stop_condition,
            metrics={**graded.metrics, **leak(text, self.leak_phrases)},
        )
