"""A reward as an option of recipes: found by name, refused with what would not change it, given judge and scorer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import chz

from viva.recipes.config import RecipeConfig

if TYPE_CHECKING:
    from viva.judging.endpoint import EndpointOptions
    from viva.judging.judge import JudgeOptions
    from viva.rewards.base import JudgeTask, Reward


def is_own(named: object) -> bool:
    """Whether what names a reward means a value of the user's own, which says all about itself."""
    from viva.selfplay.user_code import is_target

    return named is not None and (not isinstance(named, str) or is_target(named))


def refuse_unused(
    config: RecipeConfig,
    names: Sequence[str],
    why: str,
    declared_by: type[RecipeConfig] | None = None,
    *,
    remedy: str = "leave out one or the other",
) -> None:
    """Refuse options that were given, other than by default, and would change nothing: a `ValueError` with all of this.

    `declared_by` has their defaults, where the recipe's own class has options without one.
    """
    refuse_given(config, (declared_by or type(config))(log_path=""), names, why, remedy)


def refuse_given(options: object, defaults: object, names: Sequence[str], why: str, remedy: str) -> None:
    """Refuse options of a class that differ from its defaults and would change nothing, as `refuse_unused` does."""
    values = {name: getattr(options, name) for name in names}
    if given := [name for name in names if values[name] != getattr(defaults, name)]:
        told = ", ".join(f"{name}={values[name]!r:.80}" for name in given)
        raise ValueError(f"{', '.join(given)} would change nothing: {why}; got {told}; {remedy}")


def read_criteria(given: object) -> dict[str, float]:
    """Criteria and their weights, as an option gives them: ``{"It is short.": 1}``, or a YAML or JSON file.

    They are a mapping like this one, or a list of texts, or of ``text`` and ``weight``; in a text, as YAML or JSON.

    Raises:
        ValueError: If the file cannot be read, or holds anything else.
    """
    import yaml

    found, where = given, "criteria"
    try:
        if isinstance(given, str):
            is_file = not given.lstrip().startswith(("{", "["))
            where = f"criteria={given}" if is_file else where
            found = yaml.safe_load(Path(given).expanduser().read_text(encoding="utf-8") if is_file else given)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{where} cannot be read: {' '.join(str(error).split())}") from error
    if isinstance(found, Mapping):
        pairs = cast("Mapping[object, object]", found).items()
        found = [{"text": name, "weight": weight} for name, weight in pairs]
    if not isinstance(found, list) or not found:
        raise ValueError(
            f'{where} must be one or more that differ, like {{"It is short.": 1}} or a list of texts; got '
            f"{type(found).__name__ if found else 'none'}"
        )
    weights: dict[str, float] = {}
    for place, row in enumerate(cast("list[object]", found), 1):
        name, weight = _criterion(row, f"{where}: criterion {place}")
        if name in weights:
            raise ValueError(f"{where} holds the criterion {name!r} twice; leave one of them out")
        weights[name] = weight
    return weights


def _criterion(row: object, where: str) -> tuple[str, float]:
    fields = cast("dict[object, object]", row) if isinstance(row, dict) else {"text": row}
    if unknown := sorted(map(str, set(fields) - {"text", "weight"})):
        raise ValueError(f"{where} has an unknown field {unknown[0]!r}; allowed: text, weight")
    text, weight = fields.get("text"), fields.get("weight", 1.0)
    if not isinstance(text, str) or not isinstance(weight, int | float) or isinstance(weight, bool):
        raise ValueError(f"{where} needs a text, and a number as weight or none; got {text!r} and {weight!r}")
    return text.strip(), float(weight)


def criteria_field(when: str) -> Any:
    """The option ``criteria``; `when` says what it does there."""
    return chz.field(
        default=None,
        blueprint_cast=read_criteria,
        metadata={"read": read_criteria},
        doc=f'{when}: criteria and weights, like {{"It is short.": 1}}, or a YAML or JSON file of them',
    )


@chz.chz
class JudgeConfig:
    """Options of a judge, and bounds of one behind an endpoint."""

    judge_mode: Literal["logprob", "verdict"] | None = chz.field(
        default=None,
        doc="read the labels' probabilities (default), or a verdict that the judge writes (default of endpoints)",
    )
    judge_prompt: str | None = chz.field(
        default=None, doc="what the judge is told; a text of its own by default"
    )
    judge_max_tokens: int = chz.field(default=256, doc="longest verdict or answer")
    judge_answers_first: bool = chz.field(
        default=False,
        doc="the judge answers the problem itself, and judges solutions behind its own answer",
    )
    judge_model: str | None = chz.field(
        default=None, doc="of a judge at https://host/v1: the model's name there; viva eval: [A,B] for two"
    )
    judge_key_variable: str | None = chz.field(
        default=None,
        doc="environment variable with its key; default: OPENAI_API_KEY for https, none for http",
    )
    judge_concurrency: int = chz.field(default=8, doc="requests to it at a time")
    judge_timeout_s: float = chz.field(default=60.0, doc="longest time of one request")
    judge_retries: int = chz.field(default=5, doc="further attempts where it is busy")
    judge_max_requests: int | None = chz.field(default=None, doc="budget of requests")
    judge_max_total_tokens: int | None = chz.field(default=None, doc="budget of tokens, prompts included")
    judge_max_price: float | None = chz.field(default=None, doc="budget in the currency of judge_prices")
    judge_prices: list[float] | None = chz.field(
        default=None, doc="of a million tokens read and of a million sampled, like [0.15, 0.6]"
    )
    judge_body: str | None = chz.field(
        default=None, doc='fields laid over each request, as JSON; null takes one away: {"temperature": null}'
    )

    def endpoint(self, url: str, model: str | None) -> EndpointOptions:
        """The judge at an address; `ValueError` if an option is out of range, or the key is not in the environment."""
        from viva.judging.endpoint import EndpointOptions

        prices = self.judge_prices
        if prices is not None and len(prices) != 2:
            raise ValueError(f"judge_prices must be two, of tokens read and of tokens sampled; got {prices}")
        return EndpointOptions(
            url=url,
            model=model or "",
            key_variable=self.judge_key_variable,
            concurrency=self.judge_concurrency,
            timeout_s=self.judge_timeout_s,
            retries=self.judge_retries,
            max_requests=self.judge_max_requests,
            max_total_tokens=self.judge_max_total_tokens,
            max_price=self.judge_max_price,
            prices=None if prices is None else (prices[0], prices[1]),
            body=_body(self.judge_body),
        )


ENDPOINT_BOUNDS = (
    *("judge_key_variable", "judge_concurrency", "judge_timeout_s", "judge_retries"),
    *("judge_max_requests", "judge_max_total_tokens", "judge_max_price", "judge_prices"),
)
"""Options of judges behind an endpoint that change nothing in their answers."""
ENDPOINT_OPTIONS = ("judge_model", *ENDPOINT_BOUNDS, "judge_body")
"""Options of judges behind an endpoint."""


def is_address(name: str) -> bool:
    """Whether a judge's name is the address of an endpoint."""
    return name.startswith(("https://", "http://"))


def _body(text: str | None) -> Mapping[str, object]:
    if text is None:
        return {}
    try:
        found: object = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f'judge_body must be a JSON object, like {{"temperature": null}}; got {text!r}')
    return cast("dict[str, object]", found)


_JUDGE = (
    *("judge", "judge_every", "judge_decay", "judge_checkpoint", *ENDPOINT_OPTIONS),
    *("judge_mode", "judge_prompt", "judge_prompt_path", "judge_max_tokens", "judge_max_off_set_mass"),
    "judge_answers_first",
)
"""Options that say who judges, and how."""
_IN_PAIRS = ("judge_mode", "judge_prompt", "judge_prompt_path")
IDLE: Mapping[JudgeTask, tuple[tuple[str, ...], str]] = {
    "compare": ((), ""),
    "answer": (
        (*_IN_PAIRS, "judge_max_off_set_mass", "judge_answers_first"),
        "answers the problem, and compares nothing",
    ),
    "score": (_IN_PAIRS, "scores every solution by itself, and compares nothing"),
}
"""Options that change nothing, by what a judge does, and why."""


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
        doc="of labels read by their probabilities: invalid if anything else is more probable than this",
    )
    criteria: dict[str, float] | None = criteria_field("reward=rubric, by default that a solution is right")
    scorer_model: str | None = chz.field(
        default=None, doc="peer_prediction: another model that scores replies, such as a smaller one"
    )
    scorer_policy: Literal["initial", "current"] = chz.field(
        default="initial", doc="peer_prediction without scorer_model: the policy at the start, or as it is"
    )

    def free_options(self) -> frozenset[str]:
        """Options that a resumed run may set anew, with the bounds of a judge behind an endpoint."""
        return RecipeConfig.free_options(self) | frozenset(ENDPOINT_BOUNDS)

    def asking(self, reward: Reward, *, is_whole: bool) -> Reward:
        """The reward with the judge and the scorer that these options name.

        Args:
            reward: The reward.
            is_whole: Whether it is a value of the user's own, which says all about itself.

        Raises:
            ValueError: If there is no such model, or an option is given that would not change it.
        """
        from viva.judging.scorer import ScorerOptions
        from viva.recipes.common import resolve_model
        from viva.rewards.rubric import Rubric, rubric

        if reward.judge is not None and is_whole:
            why = f"the reward {reward.name} is a value that names its judge itself"
            self._refuse(_JUDGE, f"{why}; say it there, or give its name (reward={reward.name})")
        elif reward.judge is None:
            self._refuse(_JUDGE, f"the reward {reward.name} asks no judge of this recipe")
        else:
            idle, why = IDLE[reward.judge_task]
            self._refuse(idle, f"the judge of the reward {reward.name} {why}")
            reward = reward.judged_by(self.judge_options(reward.judge))
        if isinstance(reward.inner, Rubric) and not is_whole:
            if self.criteria is not None:
                reward = reward.around(rubric(self.criteria, judge=reward.judge))
        else:
            why = f"the reward {reward.name} asks no judge of this recipe about criteria"
            self._refuse(["criteria"], why)
        if reward.scorer is None or is_whole:
            if reward.scorer is not None and reward.scorer.model is not None:
                resolve_model(reward.scorer.model)
            why = f"the reward {reward.name} asks no scorer of this recipe"
            self._refuse(["scorer_model", "scorer_policy"], why)
            return reward
        model = None if self.scorer_model is None else resolve_model(self.scorer_model)
        if model is not None:
            why = f"scorer_model={self.scorer_model} is never trained"
            self._refuse(["scorer_policy"], why)
        return reward.scored_by(ScorerOptions(policy=self.scorer_policy, model=model))

    def judge_options(self, options: JudgeOptions) -> JudgeOptions:
        """The judge that these options name; what they do not say is as in the reward's, `options`.

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
                self._refuse(names, why)
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
            answers_first=self.judge_answers_first,
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

    def _refuse(self, names: Sequence[str], why: str) -> None:
        """Refuse options that were given and would change nothing."""
        from viva.judging.comparison import JUDGE_SYSTEM_PROMPT

        # a run has the default text in its config.json, from which it may be evaluated with another reward
        has_text = self.judge_prompt != JUDGE_SYSTEM_PROMPT
        refuse_unused(self, [name for name in names if has_text or name != "judge_prompt"], why, AskedConfig)
