"""``viva rescore``: its options, and the judge and the scorer that are asked anew about stored conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import chz

from viva.recipes.evaluation import JUDGE_OPTIONS, JudgedOptions, OpenedOptions
from viva.recipes.reward import IDLE, criteria_field, is_address, refuse_given
from viva.rewards.review import ReviewRules
from viva.view.files import check_transcripts, read_config
from viva.view.rescore import RescoreOptions, changed_rules, named_rewards, rescore_with

if TYPE_CHECKING:
    from viva.judging.usage import Meter
    from viva.recipes.evaluation.judges import JudgePlan, OpenJudge
    from viva.recipes.evaluation.target import OpenPolicy, Target
    from viva.rewards.base import Reward
    from viva.view.rescoring import Rescoring


@chz.chz
class AskedRescoreOptions(JudgedOptions, RescoreOptions):
    """Options of viva rescore; what is not given stays as it was in the run, and nobody is asked who is not named."""

    judge: str | None = chz.field(
        default=None,
        doc="who is asked anew: current (the run's policy), base (the same before training), a model, a run, or "
        "https://host/v1; default: nobody, what the run stored counts",
    )
    judge_max_off_set_mass: float = chz.field(
        default=0.9,
        doc="of labels read by their probabilities: invalid if anything else is more probable than this",
    )
    criteria: dict[str, float] | None = criteria_field("reward=rubric, by default those of the run")
    scorer_model: str | None = chz.field(
        default=None, doc="peer_prediction: a model or run that is asked anew how probable replies are"
    )
    scorer_policy: Literal["initial", "current"] | None = chz.field(
        default=None,
        doc="peer_prediction without scorer_model: the run's policy, before training or as it is, is asked anew",
    )

    @property
    def scorer(self) -> str | None:
        """The scorer's name, as a judge would be called."""
        own = {"initial": "base", "current": "current"}
        return self.scorer_model if self.scorer_policy is None else own[self.scorer_policy]

    @property
    def own(self) -> set[str]:
        """Names of the run's own policy that are asked."""
        asked = (self.judge, self.scorer if self.scorer_model is None else None)
        return {name for name in ("base", "current") if name in asked}


_SCORER = ("scorer_model", "scorer_policy")
_ENGINE = ("engine", "base_url", "device", "precision")
_OF_OWN = ("checkpoint", "model_name", "renderer_name")
"""Options that say something about the run's own policy alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RescorePlan:
    """Rewards, and who is asked; nothing is loaded yet."""

    rules: RescoreOptions
    rewards: Mapping[str, Reward]
    """By their rows in the table."""
    judge: JudgePlan | None = None
    scorer: Target | None = None


async def rescore_run(run_dir: str | Path, options: AskedRescoreOptions) -> Rescoring:
    """Score the conversations of a run's folder again, by a judge or scorer where one is named.

    Raises:
        ValueError: For anything the user has to fix; see also `viva.view.rescore.rescore`.
        EngineError: If a server is gone.
    """
    plan = plan_rescoring(run_dir, options)
    if plan.judge is None and plan.scorer is None:
        return await rescore_with(run_dir, plan.rules, plan.rewards)
    return await _rescore_asking(Path(run_dir), options, plan)


def plan_rescoring(run_dir: str | Path, options: AskedRescoreOptions) -> RescorePlan:
    """Check all options, and find the models that are asked.

    Raises:
        ValueError: If there is no such reward, model or run, or an option would change nothing.
    """
    rules = RescoreOptions(**{name: getattr(options, name) for name in chz.chz_fields(RescoreOptions)})
    rewards = named_rewards(rules)
    _check_name(options.judge)
    changed_rules(ReviewRules(), rules)
    _check_judge(options, rewards)
    _check_scorer(options, rewards)
    _check_opened(options)
    if options.criteria is not None:
        rewards = {name: _with_criteria(reward, options.criteria) for name, reward in rewards.items()}
    plan = RescorePlan(rules=rules, rewards=rewards)
    if options.judge is None and options.scorer is None:
        return plan
    from viva.recipes.evaluation.target import find_target

    check_transcripts(run_dir)
    own = _own_targets(run_dir, options)
    if options.judge is not None:
        plan = replace(plan, judge=_planned_judge(options, own, rewards))
    if options.scorer is not None:
        is_own = options.scorer_model is None
        plan = replace(plan, scorer=own[options.scorer] if is_own else find_target(options.scorer))
    return plan


def _check_name(judge: str | None) -> None:
    """Refuse several judges, and those that only a run has."""
    if judge is not None and "," in judge:
        raise ValueError(f"judge must name one; got {judge}: rescore once for each")
    if judge in ("initial", "every", "ema"):
        raise ValueError(
            f"judge={judge} is a run's judge of its steps, and here no step is trained; give judge=base (the policy "
            "before training), current, a model, a run or https://host/v1"
        )


def _check_judge(options: AskedRescoreOptions, rewards: Mapping[str, Reward]) -> None:
    """Refuse options of a judge that is not asked."""
    names = [*JUDGE_OPTIONS, "judge_max_off_set_mass"]
    asking = [reward for reward in rewards.values() if reward.judge is not None]
    if options.judge is None:
        fix = "add judge=base, current, a model, a run or https://host/v1"
        _refuse(options, names, "nobody is asked", fix)
    elif rewards and not asking:
        named = rewards["total"].name
        fix = "give reward=judge_answer, rubric, serl, tournament or all, or leave it out"
        _refuse(options, names, f"the reward {named!r} asks no judge", fix)
    elif (
        not rewards and (options.fit or ("separate" if options.preset == "paper" else "joint")) == "separate"
    ):
        _refuse(options, names, "with fit=separate no judge is asked", "add fit=joint, or leave it out")
    elif len(rewards) == 1:
        idle, why = IDLE[asking[0].judge_task]
        named = asking[0].name
        _refuse(options, [each for each in idle if each in names], f"the judge of the reward {named!r} {why}")
    if not any(_is_rubric(reward) for reward in rewards.values()):
        _refuse(options, ["criteria"], "no judge is asked about criteria", "add reward=rubric")


def _check_scorer(options: AskedRescoreOptions, rewards: Mapping[str, Reward]) -> None:
    """Refuse options of a scorer that is not asked."""
    if all(reward.scorer is None for reward in rewards.values()):
        named = f"the reward {rewards['total'].name!r} asks no scorer" if rewards else "no scorer is asked"
        _refuse(options, _SCORER, named, "give reward=peer_prediction or all, or leave it out")
    if options.scorer_model is not None:
        _refuse(options, ["scorer_policy"], f"scorer_model={options.scorer_model} is asked")


def _check_opened(options: AskedRescoreOptions) -> None:
    """Refuse options of engines and policies that are not opened."""
    if options.judge is None and options.scorer is None:
        names = [*chz.chz_fields(OpenedOptions)]
        _refuse(options, names, "nobody is asked", "add judge=... or scorer_model=...")
    if options.scorer is None and is_address(options.judge or ""):
        _refuse(options, _ENGINE, "an endpoint has an engine of its own")
    if not options.own:
        _refuse(options, _OF_OWN, "the run's own policy is not asked", "add judge=current, or leave it out")
    if "current" not in options.own:
        _refuse(options, ["checkpoint"], "base is the policy before training", "give judge=current")


def _refuse(
    options: AskedRescoreOptions, names: Sequence[str], why: str, remedy: str = "leave out one or the other"
) -> None:
    refuse_given(options, AskedRescoreOptions(), names, why, remedy)


def _is_rubric(reward: Reward) -> bool:
    from viva.rewards.rubric import Rubric

    return isinstance(reward.inner, Rubric)


def _with_criteria(reward: Reward, criteria: Mapping[str, float]) -> Reward:
    from viva.rewards.rubric import rubric

    return reward.around(rubric(criteria)) if _is_rubric(reward) else reward


def _own_targets(run_dir: str | Path, options: AskedRescoreOptions) -> dict[str, Target]:
    """The run's own policy by the names under which it is asked."""
    from viva.recipes.evaluation.target import find_target

    checkpoints = {"base": "base", "current": options.checkpoint}
    return {
        name: find_target(str(run_dir), checkpoint=checkpoints[name], model_name=options.model_name)
        for name in sorted(options.own)
    }


def _planned_judge(
    options: AskedRescoreOptions, own: Mapping[str, Target], rewards: Mapping[str, Reward]
) -> JudgePlan:
    """The judge as ``viva eval`` finds it; what the options do not say is as in a reward that is alone."""
    from viva.judging.endpoint import EndpointOptions
    from viva.judging.judge import JudgeOptions
    from viva.recipes.evaluation.judges import plan_judges

    (plan,) = plan_judges(options, own)
    alone = rewards["total"].judge if len(rewards) == 1 else None
    default = alone or JudgeOptions()
    is_outside = isinstance(plan.source, EndpointOptions)
    how = replace(
        plan.options,
        mode=options.judge_mode or ("verdict" if is_outside else default.mode),
        system_prompt=options.judge_prompt or default.system_prompt,
        max_off_set_mass=options.judge_max_off_set_mass,
    )
    return replace(plan, options=how)


async def _rescore_asking(run_dir: Path, options: AskedRescoreOptions, plan: RescorePlan) -> Rescoring:
    from viva.judging.judge import PolicyRef
    from viva.judging.scorer import Scorer
    from viva.judging.usage import Meter, metering
    from viva.recipes.evaluation.judges import opened_judges
    from viva.recipes.evaluation.plan import open_target
    from viva.rewards.base import Models
    from viva.run.kept_answers import ANSWERS_FILE
    from viva.training.service import Engines

    meter = Meter()
    judges = () if plan.judge is None else (plan.judge,)
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(Engines())
        kept = run_dir / "eval" / ANSWERS_FILE
        opened = await stack.enter_async_context(opened_judges(judges, options, engines, kept))
        models = Models(system_prompt=read_config(run_dir).get("system_prompt"))
        watched = {judge.engine for judge in opened}
        for judge in opened:
            models = models._replace(judge=judge.judge)
        if plan.scorer is not None:
            own = options if options.scorer_model is None else chz.replace(options, renderer_name=None)
            policy: OpenPolicy = await open_target(plan.scorer, own, engines)
            models = models._replace(scorer=Scorer(PolicyRef(sampling_client=policy.client), policy.renderer))
            watched.add(policy.engine)
        for engine in watched:
            await stack.enter_async_context(engine.watched())
        with metering(meter):
            result = await rescore_with(run_dir, plan.rules, plan.rewards, models)
        result.notes = _notes(opened, options.scorer, meter)
    return result


def _notes(opened: Sequence[OpenJudge], scorer: str | None, meter: Meter) -> tuple[str, ...]:
    """A line for everybody who could be asked."""
    from viva.judging.endpoint_judge import EndpointJudge
    from viva.recipes.evaluation.judges import usage_text

    notes: list[str] = []
    for each in opened:
        if isinstance(each.judge, EndpointJudge):
            notes.append(usage_text(each.plan.name, each.judge.endpoint))
        else:
            notes.append(_told(f"judge {each.plan.name}", meter, "judge"))
    if scorer is not None:
        notes.append(_told(f"scorer {scorer}", meter, "scorer"))
    return tuple(notes)


def _told(who: str, meter: Meter, role: Literal["judge", "scorer"]) -> str:
    usage = meter.by_role.get(role)
    if usage is None:
        return f"{who}: nothing was asked"
    return f"{who}: {usage.prompt_tokens:,} tokens read and {usage.sampled_tokens:,} sampled"
