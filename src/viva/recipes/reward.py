"""A reward as an option of recipes: found by name, refused with what would not change it, and given its scorer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import chz

from viva.recipes.config import RecipeConfig

if TYPE_CHECKING:
    from tinker_cookbook.renderers.base import Renderer

    from viva.judging.base import Judge
    from viva.judging.judge import PolicyRef, SamplingClient
    from viva.judging.scorer import Scorer
    from viva.recipes.common import OpenRun
    from viva.recipes.plan import Plan
    from viva.rewards.base import Reward
    from viva.sdk import ServiceClient


def reward_named(value: object) -> Reward:
    """The reward that an option or a protocol names, the user's own included.

    Raises:
        ValueError: If there is no such reward, or the user's code is not there.
    """
    from viva.rewards import find_reward
    from viva.selfplay.user_code import is_target, load_target

    return find_reward(load_target(value) if isinstance(value, str) and is_target(value) else value)


def user_code(*names: str | None) -> dict[str, str | None]:
    """Digests of the files of the user's own code among names, for ``config.json``."""
    from viva.selfplay.user_code import is_target, source_digest

    return {name: source_digest(name) for name in names if name is not None and is_target(name)}


def refuse_unused(
    config: RecipeConfig, names: Sequence[str], why: str, declared_by: type[RecipeConfig] | None = None
) -> None:
    """Refuse options that were given and would change nothing.

    Args:
        config: The options.
        names: Of those that would change nothing.
        why: In the message.
        declared_by: Class with their defaults, where the recipe's own has options without one.

    Raises:
        ValueError: With their names and ``why``.
    """
    defaults = (declared_by or type(config))(log_path="")
    if given := [name for name in names if getattr(config, name) != getattr(defaults, name)]:
        raise ValueError(f"{', '.join(given)} would change nothing: {why}; leave out one or the other")


@chz.chz
class ScorerConfig(RecipeConfig):
    """Options of rewards that ask a model how probable replies are."""

    scorer_model: str | None = chz.field(
        default=None, doc="peer_prediction: another model that scores replies, such as a smaller one"
    )
    scorer_policy: Literal["initial", "current"] = chz.field(
        default="initial", doc="peer_prediction without scorer_model: the policy at the start, or as it is"
    )

    def with_scorer(self, reward: Reward, *, is_whole: bool) -> Reward:
        """The reward with the scorer that these options name.

        Args:
            reward: The reward.
            is_whole: Whether it is a value of the user's own, which says all about itself.

        Raises:
            ValueError: If there is no such model, or an option is given that would not change it.
        """
        from viva.judging.scorer import ScorerOptions
        from viva.recipes.common import resolve_model

        if reward.scorer is None or is_whole:
            if reward.scorer is not None and reward.scorer.model is not None:
                resolve_model(reward.scorer.model)
            why = f"the reward {reward.name} asks no scorer of this recipe"
            refuse_unused(self, ["scorer_model", "scorer_policy"], why, ScorerConfig)
            return reward
        model = None if self.scorer_model is None else resolve_model(self.scorer_model)
        if model is not None:
            why = f"scorer_model={self.scorer_model} is never trained"
            refuse_unused(self, ["scorer_policy"], why, ScorerConfig)
        return reward.scored_by(ScorerOptions(policy=self.scorer_policy, model=model))


async def asked_by(
    reward: Reward | None, plan: Plan, opened: OpenRun
) -> tuple[Judge | None, Scorer | None, list[PolicyRef]]:
    """Judge and scorer that a reward asks for, and the references that have to follow the policy being trained.

    Raises:
        ValueError: If a model cannot be had.
    """
    from viva.recipes.loop import judged_by

    if reward is None:
        return None, None, []
    judge, refs = None, []
    if reward.judge is not None:
        policy, refs = await judged_by(reward.judge.policy, plan, opened)
        judge = reward.judge.make(policy, opened.renderer)
    scorer, more = await scorer_of(reward, plan, opened)
    return judge, scorer, [*refs, *more]


async def scorer_of(reward: Reward, plan: Plan, opened: OpenRun) -> tuple[Scorer | None, list[PolicyRef]]:
    """The scorer that a reward asks for, and those references that have to follow the policy being trained.

    Raises:
        ValueError: If the model cannot be had.
    """
    from viva.judging.judge import PolicyRef
    from viva.judging.scorer import Scorer
    from viva.recipes.common import resolve_model
    from viva.recipes.loop import judged_by

    options = reward.scorer
    if options is None:
        return None, []
    if options.model is None:
        policy, refs = await judged_by(options.policy, plan, opened)
        return Scorer(policy, opened.renderer), refs
    client, renderer = await open_model(opened.service, resolve_model(options.model))
    kept = opened.folder.journal.client(client, f"scorer {options.model}")
    policy = PolicyRef(sampling_client=kept, timeout_s=plan.config.policy_timeout_s)
    return Scorer(policy, renderer), []


async def open_model(service: ServiceClient, model: str) -> tuple[SamplingClient, Renderer]:
    """A model as it is, beside the one that is trained, and the renderer of its own chat format."""
    from viva.conversation.rendering import load_renderer
    from viva.hub import split_revision
    from viva.sdk import settled

    client: Any = await settled(service.create_sampling_client(base_model=model))
    return client, load_renderer(client.get_tokenizer(), model_name=split_revision(model)[0])
