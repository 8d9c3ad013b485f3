"""A reward as an option of recipes: found by name, refused with what would not change it, given judge and scorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import chz

from viva.recipes.config import RecipeConfig
from viva.recipes.judge_options import ENDPOINT_OPTIONS, JudgeConfig, is_address

if TYPE_CHECKING:
    from tinker_cookbook.renderers.base import Renderer

    from viva.judging.comparison import Judge
    from viva.judging.judge import JudgeOptions, SamplingClient
    from viva.judging.scorer import Scorer, ScorerOptions
    from viva.recipes.common import OpenRun
    from viva.recipes.plan import Plan
    from viva.rewards.base import Reward
    from viva.sdk import ServiceClient
    from viva.training.followers import Follower


def reward_named(value: object) -> Reward:
    """The reward that an option or a protocol names, the user's own included.

    Raises:
        ValueError: If there is no such reward, or the user's code is not there.
    """
    from viva.rewards import find_reward
    from viva.selfplay.user_code import is_target, load_target

    return find_reward(load_target(value) if isinstance(value, str) and is_target(value) else value)


def is_own(named: object) -> bool:
    """Whether what names a reward means a value of the user's own, which says all about itself."""
    from viva.selfplay.user_code import is_target

    return named is not None and (not isinstance(named, str) or is_target(named))


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


_JUDGE = (
    *("judge", "judge_every", "judge_decay", "judge_checkpoint", *ENDPOINT_OPTIONS),
    *("judge_mode", "judge_prompt", "judge_prompt_path", "judge_max_tokens", "judge_max_off_set_mass"),
)
"""Options that say who judges, and how."""


@chz.chz
class AskedConfig(JudgeConfig, RecipeConfig):
    """Options of rewards that ask models: a judge who compares solutions, a scorer who tells how probable they are."""

    judge: str = chz.field(
        default="current",
        doc="who judges: the policy as it is (current), at the start (initial), every judge_every steps (every), the "
        "moving average of its weights (ema), a model (tiny, a folder, a GGUF file, a hub name), a run, or "
        "https://host/v1",
    )
    judge_every: int | None = chz.field(
        default=None, doc="judge=every: steps until the judge is the policy again; default: 10"
    )
    judge_decay: float | None = chz.field(
        default=None, doc="judge=ema: share of the average that stays at each step; default: 0.9"
    )
    judge_checkpoint: str | None = chz.field(
        default=None, doc="judge=RUN: last, best or a name; default: what the run ended with"
    )
    judge_prompt_path: str | None = chz.field(default=None, doc="file with what the judge is told")
    judge_max_off_set_mass: float = chz.field(
        default=0.9,
        doc="with logprob: a comparison is invalid if anything but a label is more probable than this",
    )
    scorer_model: str | None = chz.field(
        default=None, doc="peer_prediction: another model that scores replies, such as a smaller one"
    )
    scorer_policy: Literal["initial", "current"] = chz.field(
        default="initial", doc="peer_prediction without scorer_model: the policy at the start, or as it is"
    )

    def asking(self, reward: Reward, *, is_whole: bool) -> Reward:
        """The reward with the judge and the scorer that these options name.

        Args:
            reward: The reward.
            is_whole: Whether it is a value of the user's own, which says all about itself.

        Raises:
            ValueError: If there is no such model, or an option is given that would not change it.
        """
        return self._scored(self._judged(reward, is_whole=is_whole), is_whole=is_whole)

    def judge_options(self, options: JudgeOptions) -> JudgeOptions:
        """The judge that these options name.

        Args:
            options: Of the reward, for what is not given.

        Raises:
            ValueError: If there could be no such judge, or an option is given that would not change it.
        """
        from viva.judging.judge import POLICIES, check_policy
        from viva.recipes.plan import at_least

        chosen = self.judge
        is_outside = is_address(chosen)
        if not is_outside:
            check_policy(chosen, "judge")
        at_least(self, {"judge_every": 1, "judge_max_tokens": 1})
        if self.judge_decay is not None and not 0 < self.judge_decay < 1:
            raise ValueError(f"judge_decay must be above 0 and below 1, like 0.9; got {self.judge_decay}")
        if not 0 <= self.judge_max_off_set_mass <= 1:
            raise ValueError(f"judge_max_off_set_mass must be from 0 to 1; got {self.judge_max_off_set_mass}")
        for names, needed, belongs in (
            (["judge_every"], "every", chosen == "every"),
            (["judge_decay"], "ema", chosen == "ema"),
            (["judge_checkpoint"], "RUN", chosen not in POLICIES and not is_outside),
            (ENDPOINT_OPTIONS, "https://host/v1", is_outside),
        ):
            if not belongs:
                why = f"it belongs to judge={needed}, and judge is {chosen}"
                refuse_unused(self, names, why, AskedConfig)
        given = {"every": self.judge_every, "decay": self.judge_decay, "checkpoint": self.judge_checkpoint}
        given = {name: value for name, value in given.items() if value is not None}
        return replace(
            options,
            policy="current" if is_outside else chosen,
            endpoint=self.endpoint(chosen, self.judge_model) if is_outside else None,
            mode=self.judge_mode or ("verdict" if is_outside else options.mode),
            system_prompt=self.judge_text() or options.system_prompt,
            max_tokens=self.judge_max_tokens,
            max_off_set_mass=self.judge_max_off_set_mass,
            **given,
        )

    def judge_text(self) -> str | None:
        """The judge's system message, the text or the file's, if there is one.

        Raises:
            ValueError: If there are two, or none can be read.
        """
        text = self.judge_prompt
        if self.judge_prompt_path is not None:
            if text is not None:
                raise ValueError("give judge_prompt or judge_prompt_path, not both")
            path = Path(self.judge_prompt_path).expanduser()
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"judge_prompt_path={path} cannot be read as UTF-8 text: {error}") from error
        if text is not None and not text.strip():
            raise ValueError(
                "judge_prompt must be text that is not empty; it must ask for a JSON object with preference"
            )
        return text

    def refuse_judge(self, why: str) -> None:
        """Refuse options of a judge where nobody asks one.

        Raises:
            ValueError: With their names and ``why``.
        """
        from viva.judging.comparison import JUDGE_SYSTEM_PROMPT

        # a run has the default text in its config.json, from which it may be evaluated with another reward
        has_text = self.judge_prompt != JUDGE_SYSTEM_PROMPT
        refuse_unused(self, [name for name in _JUDGE if has_text or name != "judge_prompt"], why, AskedConfig)

    def _judged(self, reward: Reward, *, is_whole: bool) -> Reward:
        if reward.judge is None or is_whole:
            self.refuse_judge(f"the reward {reward.name} asks no judge of this recipe")
            return reward
        return reward.judged_by(self.judge_options(reward.judge))

    def _scored(self, reward: Reward, *, is_whole: bool) -> Reward:
        from viva.judging.scorer import ScorerOptions
        from viva.recipes.common import resolve_model

        if reward.scorer is None or is_whole:
            if reward.scorer is not None and reward.scorer.model is not None:
                resolve_model(reward.scorer.model)
            why = f"the reward {reward.name} asks no scorer of this recipe"
            refuse_unused(self, ["scorer_model", "scorer_policy"], why, AskedConfig)
            return reward
        model = None if self.scorer_model is None else resolve_model(self.scorer_model)
        if model is not None:
            why = f"scorer_model={self.scorer_model} is never trained"
            refuse_unused(self, ["scorer_policy"], why, AskedConfig)
        return reward.scored_by(ScorerOptions(policy=self.scorer_policy, model=model))


async def asked_by(
    reward: Reward | None, plan: Plan, opened: OpenRun
) -> tuple[Judge | None, Scorer | None, list[Follower]]:
    """Judge and scorer that a reward asks for, and what gives them their weights at each step.

    Raises:
        ValueError: If a model cannot be had.
    """
    from viva.recipes.judges import judge_of

    judge, followers = None, []
    if reward is not None and reward.judge is not None:
        judge, followers = await judge_of(reward.judge, plan, opened)
    if reward is None or reward.scorer is None:
        return judge, None, followers
    scorer, more = await _scorer_of(reward.scorer, plan, opened)
    return judge, scorer, [*followers, *more]


async def _scorer_of(options: ScorerOptions, plan: Plan, opened: OpenRun) -> tuple[Scorer, list[Follower]]:
    from viva.judging.judge import JudgeOptions, PolicyRef
    from viva.judging.scorer import Scorer
    from viva.recipes.common import resolve_model
    from viva.recipes.judges import policy_of

    if options.model is None:
        policy, followers = await policy_of(JudgeOptions(policy=options.policy), plan, opened)
        return Scorer(policy, opened.renderer), followers
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
