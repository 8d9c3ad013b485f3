"""``prompt_augmentation``: sample under extra instructions, train without them.

The policy learns to do unasked what it can do when instructed. What else the instructions put into its words (a habit
of speech, a mention of the instruction itself) may be learnt as well: name such phrases, and watch their rate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers.base import Message, Renderer
from tinker_cookbook.rl.problem_env import ProblemEnv
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, Observation, StepResult

from viva.conversation.rendering import build_prompt, read_reply


def leak(text: str, phrases: Sequence[str]) -> dict[str, float]:
    """Metric ``leak``: 1 if one of the phrases occurs in the text, whatever the case; nothing without phrases."""
    if not phrases:
        return {}
    return {"leak": float(any(phrase.casefold() in text.casefold() for phrase in phrases))}


class PromptAugmentedEnv(ProblemEnv):
    """One question, asked behind one prefix and trained behind another.

    Subclasses say what the question is and how answers are checked, as for every ``ProblemEnv``. With equal prefixes it
    is an ordinary problem.

    Args:
        renderer: From `viva.conversation.rendering.load_renderer`; of both contexts.
        sampling_convo_prefix: Messages before the question, as the sampler sees it.
        training_convo_prefix: Messages before the question, as it is trained.
        leak_phrases: Words of the hint that should not turn up in replies; their rate is the metric ``leak``.
        format_coef: See ``ProblemEnv``.
    """

    def __init__(
        self,
        renderer: Renderer,
        sampling_convo_prefix: list[Message],
        training_convo_prefix: list[Message],
        *,
        leak_phrases: Sequence[str] = (),
        format_coef: float = 0.1,
    ) -> None:
        super().__init__(renderer, convo_prefix=training_convo_prefix, format_coef=format_coef)
        self.sampling_convo_prefix = sampling_convo_prefix
        self.training_convo_prefix = training_convo_prefix
        self.leak_phrases = tuple(leak_phrases)

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """The question as it is sampled."""
        return self._observation(self.sampling_convo_prefix), self.stop_condition

    def get_training_observation(self) -> Observation:
        """The question as it is trained."""
        return self._observation(self.training_convo_prefix)

    def _observation(self, prefix: list[Message]) -> Observation:
        return build_prompt(self.renderer, [*prefix, Message(role="user", content=self.get_question())])

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Grade the reply; see ``ProblemEnv``."""
        result = await super().step(action, extra=extra)
        text, _ = read_reply(self.renderer, list(action))
        result.metrics |= leak(text, self.leak_phrases)
        return result


@dataclass(kw_only=True)
class PromptAugmentedGroupBuilder(EnvGroupBuilder):
    """A group of answers to one question under extra instructions, trained without them."""

    env_thunk: Callable[[], PromptAugmentedEnv]
    """Makes one environment; all of a group ask the same."""
    num_envs: int
    strategy_id: str = "prompt_augmentation"
    weight: float | None = None
    tags: tuple[str, ...] = ()
    _training_observation: Observation | None = field(default=None, init=False, repr=False)

    async def make_envs(self) -> Sequence[Env]:
        """`num_envs` environments.

        Raises:
            ValueError: If they would be trained in different contexts.
        """
        envs = [self.env_thunk() for _ in range(self.num_envs)]
        contexts = [env.get_training_observation() for env in envs]
        if any(context != contexts[0] for context in contexts):
            raise ValueError(
                "all environments of a group must ask the same question; env_thunk made different ones"
            )
        self._training_observation = contexts[0] if contexts else None
        return envs

    def context_transform(self, observation: Observation, turn_index: int) -> Observation:
        """The question without the extra instructions.

        Raises:
            RuntimeError: Before `make_envs`.
        """
        del observation, turn_index
        if self._training_observation is None:
            raise RuntimeError("the training context is known once make_envs was called")
        return self._training_observation

    def logging_tags(self) -> list[str]:
        """The strategy, and the tags."""
        return [self.strategy_id, *self.tags]
