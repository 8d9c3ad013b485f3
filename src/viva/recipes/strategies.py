"""The search strategies of the recipe by name, and how a strategy of the user's own joins them.

A strategy is a function from a `Task` (one problem of one batch, with everything a strategy may need) to a group
builder, see `viva.experts.strategy`. Those of the recipe are in `STRATEGIES`; any other is named on the command line as
``module:FUNCTION`` or ``path.py:FUNCTION``.

One problem, one reply: right answers are paid, short right answers a little more.

With ``n`` sampled tokens, a budget of ``N`` tokens and a length weight ``a`` in [0, 1)::

    reward = 1[right and finished] * (1 - a * min(n / N, 1))

Correctness gates the length term, as in Arora and Zanette (2025, arXiv 2502.04463): every right reply earns more than
any wrong one, and a wrong one earns 0 however short it is. They scale lengths by the mean and deviation of a prompt's
right replies. The fixed scale here makes rewards of different strategies, batches and steps comparable, which union
baselines need, and bounds what brevity can cost: a right reply earns between 1 - a and 1, so a policy whose mean
reward has not fallen has kept at least the share 1 - a of its accuracy. Paying by the inverse of the length has no such
bound. A truncated reply is wrong; the rate of them is the metric ``truncated``.

Another reward of `viva.rewards` (option ``reward``) pays groups of plain samples as a whole, instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isbuiltin, signature
from typing import TYPE_CHECKING, TypeAlias, cast

import tinker
from tinker_cookbook.renderers.base import Message, Renderer
from tinker_cookbook.rl.problem_env import ProblemGroupBuilder
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Metrics,
    StepResult,
    Trajectory,
)

from viva.conversation.messages import unknown
from viva.conversation.rendering import read_reply, system_messages
from viva.experts.assisted import (
    Feedback,
    FeedbackGroupBuilder,
    GeneratedFeedback,
    PromptAugmentedEnv,
    PromptAugmentedGroupBuilder,
    leak,
    problem_record,
    verifier_feedback,
)
from viva.experts.conversation_expert import ConversationExpertGroupBuilder
from viva.experts.strategy import BestOfGroupBuilder, iid
from viva.judging.answers import is_correct
from viva.judging.comparison import Judge
from viva.judging.judge import PolicyRef
from viva.judging.scorer import Scorer
from viva.rewards.base import Grader, Models
from viva.rewards.solutions import SolutionReward, Solutions
from viva.selfplay.user_code import is_target, load_target
from viva.training.data import PromptItem

if TYPE_CHECKING:
    from viva.recipes.math_efficiency import Config

DEFAULT_HINT = "Work slowly and check every step. Then write the full solution as short as you can."


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """A reply's reward with its reasons."""

    reward: float
    metrics: dict[str, float]
    """``truncated``; ``correct``, where the answer is known, and ``correct_tokens``, if the reply is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficientReward:
    """The reward of replies to one problem, see the module; `ValueError` if the budget or the weight makes no sense."""

    answer: str | None
    """The known answer; GSM8K's worked solutions (``... #### 72``) are read as they are. ``None``: nothing is right."""
    token_budget: int
    """N. Longer replies, where the sampler allows them, earn no less than one of N tokens."""
    length_weight: float = 0.1
    """a; 0 pays for correctness alone."""
    grader: Grader = is_correct
    """Whether a reply (first) gives the answer (second)."""

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
        """Grade one reply that the policy ended or not.

        Its text is without end-of-turn token and thinking; the number of sampled tokens has them.
        """
        is_right = is_finished and self.answer is not None and self.grader(text, self.answer)
        share = min(num_tokens / self.token_budget, 1.0)
        known = {} if self.answer is None else {"correct": float(is_right)}
        metrics = known | {"truncated": float(not is_finished)}
        if is_right:
            metrics["correct_tokens"] = float(num_tokens)
        return Graded(reward=(1.0 - self.length_weight * share) if is_right else 0.0, metrics=metrics)


class EfficientEnv(PromptAugmentedEnv):
    """A problem asked once, behind a hint or without one, and always trained without it.

    Prefixes and ``leak_phrases`` are those of `PromptAugmentedEnv`. The step pays the reward if ``is_paid``, else the
    group does.
    """

    def __init__(
        self,
        renderer: Renderer,
        question: str,
        reward: EfficientReward,
        *,
        sampling_convo_prefix: Sequence[Message] = (),
        training_convo_prefix: Sequence[Message] = (),
        leak_phrases: Sequence[str] = (),
        is_paid: bool = True,
    ) -> None:
        super().__init__(
            renderer, list(sampling_convo_prefix), list(training_convo_prefix), leak_phrases=leak_phrases
        )
        self.is_paid = is_paid
        self.question = question
        self.reward = reward
        self.replied: tuple[str, Graded] | None = None
        """The reply's text and what it earned, once it was given."""

    def get_question(self) -> str:
        """The problem."""
        return self.question

    def check_answer(self, sample_str: str) -> bool:
        """Whether a text gives the known answer."""
        return self.reward.answer is not None and self.reward.grader(sample_str, self.reward.answer)

    def check_format(self, sample_str: str) -> bool:
        """Any form is allowed that the answer can be found in; what is paid is `EfficientReward`."""
        return True

    def get_reference_answer(self) -> str:
        """The known answer, or an empty text."""
        return self.reward.answer or ""

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Grade the reply; the episode is over."""
        text, is_clean = read_reply(self.renderer, list(action))
        is_finished = is_clean and (extra or {}).get("stop_reason", "stop") == "stop"
        graded = self.reward(text, num_tokens=len(action), is_finished=is_finished)
        self.replied = text, graded
        self.keep(text, graded.metrics)
        return StepResult(
            reward=graded.reward if self.is_paid else 0.0,
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=self.stop_condition,
            metrics={**graded.metrics, **leak(text, self.leak_phrases)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem of one batch, for which a strategy makes a group."""

    item: PromptItem
    seed: int
    """Seed of the group; strategies of the same problem have different ones."""
    renderer: Renderer
    reward: EfficientReward
    group_size: int
    policy: PolicyRef
    """Always holds the newest policy, for what a strategy samples besides its turns."""
    judge: Callable[[], Judge]
    """The run's one judge: by default that policy."""
    options: Config
    """The options of the run."""
    group_reward: SolutionReward | None = None
    """Pays the replies of a group of plain samples in place of `reward`."""
    group_scorer: Scorer | None = None
    """The scorer that it asks for."""

    @property
    def hint(self) -> str:
        """The system message of ``prompt_augmentation``."""
        return DEFAULT_HINT if self.options.hint is None else self.options.hint

    def env(self, *, hint: str | None = None, leak_phrases: Sequence[str] = ()) -> EfficientEnv:
        """The problem, sampled behind a hint (in the system message) if one is given, and trained without it."""
        system_prompt = self.options.system_prompt
        return EfficientEnv(
            self.renderer,
            self.item.question,
            self.reward,
            sampling_convo_prefix=system_messages(system_prompt, hint),
            training_convo_prefix=system_messages(system_prompt),
            leak_phrases=leak_phrases,
            is_paid=self.group_reward is None,
        )

    def group(self) -> ProblemGroupBuilder:
        """The bare problem, asked `group_size` times."""
        asks_judge = self.group_reward is not None and self.group_reward.judge is not None
        return _AskedProblem(
            env_thunk=self.env,
            num_envs=self.group_size,
            dataset_name="problems",
            group_reward=self.group_reward,
            judge=self.judge() if asks_judge else None,
            scorer=self.group_scorer,
            system_prompt=self.options.system_prompt,
            seed=self.seed,
        )

    def verify(self, solution: str) -> float:
        """The reward of a solution that was not sampled as a reply of its own; its length is that of its text."""
        num_tokens = len(self.renderer.tokenizer.encode(solution, add_special_tokens=False)) + 1
        return self.reward(solution, num_tokens=num_tokens, is_finished=True).reward


@dataclass(frozen=True)
class _AskedProblem(ProblemGroupBuilder):
    """A problem asked several times, whose replies are kept for the transcript."""

    group_reward: SolutionReward | None = None
    judge: Judge | None = None
    scorer: Scorer | None = None
    system_prompt: str | None = None
    seed: int = 0
    kept: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    """The last group's record, once its rewards were asked for."""

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Rewards of the group's own reward, if it has one, beside those of the environments; keeps what was said."""
        reward = self.group_reward
        if reward is None:
            self.kept[:] = [problem_record(env_group, trajectory_group)]
            return await super().compute_group_rewards(trajectory_group, env_group)
        asked = cast(EfficientEnv, env_group[0]).question
        group = _solutions(trajectory_group, env_group, self.seed)
        group = await reward.ask(group, asked, Models(self.judge, self.scorer, self.system_prompt))
        rewards, figures = reward.pay(group), reward.figures(group)
        self.kept[:] = [problem_record(env_group, trajectory_group, rewards) | reward.told(group)]
        return [(reward, figures) for reward in rewards]

    def record(self) -> dict[str, object] | None:
        """The problem and its replies, with the keys of a conversation of one round."""
        return self.kept[0] if self.kept else None


def _solutions(trajectories_G: Sequence[Trajectory], env_group: Sequence[Env], seed: int) -> Solutions:
    """The replies of a group of plain samples, graded where the answer is known."""
    asked = [env for env in env_group if isinstance(env, EfficientEnv)]
    replied = [env.replied or ("", Graded(reward=0.0, metrics={"truncated": 1.0})) for env in asked]
    texts = [text for text, _ in replied]
    return Solutions(
        final_G=texts,
        first_G=texts,
        finished_G=[not graded.metrics["truncated"] for _, graded in replied],
        logprobs_G_T=[trajectory.transitions[-1].ac.logprobs for trajectory in trajectories_G],
        graded_G=None if asked[0].reward.answer is None else [graded.reward for _, graded in replied],
        seed=seed,
    )


StrategyFactory: TypeAlias = Callable[[Task], EnvGroupBuilder]


def _prompt_augmentation(task: Task) -> EnvGroupBuilder:
    options = task.options
    return PromptAugmentedGroupBuilder(
        env_thunk=lambda: task.env(hint=task.hint, leak_phrases=tuple(options.leak_phrases or ())),
        num_envs=task.group_size,
    )


def _feedback(task: Task) -> EnvGroupBuilder:
    options = task.options
    feedback: Feedback = verifier_feedback
    if options.feedback == "generated":
        feedback = GeneratedFeedback(
            policy=task.policy,
            renderer=task.renderer,
            seed=task.seed,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
        )
    return FeedbackGroupBuilder(
        env_thunk=task.env,
        num_envs=task.group_size,
        feedback=feedback,
        train_behind=options.train_behind,
        leak_phrases=tuple(options.leak_phrases or ()),
    )


def _conversation(task: Task) -> EnvGroupBuilder:
    return ConversationExpertGroupBuilder(
        inner=conversation(task),
        question=task.item.question,
        renderer=task.renderer,
        system_prompt=task.options.system_prompt,
        verify=task.verify if task.options.conversation_reward == "verifier" else None,
        leak_phrases=tuple(task.options.leak_phrases or ()),
    )


def conversation(task: Task) -> EnvGroupBuilder:
    """The conversation about a problem by itself, without what is trained of it."""
    game = task.options.game()
    judge = None if game.reward.judge is None else task.judge()
    factory = game.factory(task.renderer, task.reward.grader, judge=judge)
    return factory(task.item, task.seed)


STRATEGIES: Mapping[str, StrategyFactory] = {
    "iid": lambda task: iid(task.group()),
    "prompt_augmentation": _prompt_augmentation,
    "feedback": _feedback,
    "conversation": _conversation,
    "best_of": lambda task: BestOfGroupBuilder(inner=task.group(), keep=task.options.keep),
}
"""The strategies of the recipe, by name."""


def find_strategies(names: Sequence[str]) -> dict[str, StrategyFactory]:
    """Strategies in the order given, by their ids: the recipe's names, or the names of the user's functions.

    Raises:
        ValueError: If there are none, one is unknown, two have the same id, or a function has that of the recipe's own.
    """
    if not names:
        raise ValueError(f"strategies must name at least one of {', '.join(STRATEGIES)}; got none")
    found: dict[str, StrategyFactory] = {}
    for name in names:
        strategy_id, factory = _find(name)
        if strategy_id in found:
            raise ValueError(
                f"strategies names {strategy_id!r} twice; raise its weight or group_size instead"
            )
        found[strategy_id] = factory
    return found


def _find(name: str) -> tuple[str, StrategyFactory]:
    if name in STRATEGIES:
        return name, STRATEGIES[name]
    if is_target(name):
        factory: object = load_target(name)
        if not callable(factory) or isbuiltin(factory):
            kind = "a function built into Python" if isbuiltin(factory) else type(factory).__name__
            raise ValueError(f"{name!r} must be a function of a Task that you wrote; got {kind}")
        try:
            signature(factory).bind(object())
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name!r} must be a function of a Task, its only argument: {error}") from error
        own = name.rpartition(":")[2]
        if own in STRATEGIES:
            raise ValueError(
                f"{name!r} has the name of a strategy of the recipe; rename the function, to my_{own} for example"
            )
        return own, cast(StrategyFactory, factory)
    raise ValueError(unknown("strategy", name, STRATEGIES, also=", module:FUNCTION or path.py:FUNCTION"))
