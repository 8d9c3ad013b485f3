"""Judge and scorer of a run: checked with its options, opened with its engine, and given their weights at each step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tinker_cookbook.renderers.base import Renderer

from viva.judging import comparison
from viva.judging.comparison import Judge
from viva.judging.endpoint import ChatEndpoint
from viva.judging.endpoint_judge import EndpointJudge
from viva.judging.judge import (
    POLICIES,
    JudgeOptions,
    PolicyRef,
    PolicySelfComparisonJudge,
    SamplingClient,
    check_policy,
)
from viva.judging.scorer import Scorer, ScorerOptions
from viva.recipes.common import NOBODY, OpenRun, renderer_of, resolve_model
from viva.rewards.base import Reward
from viva.run.kept_answers import ANSWERS_FILE, AnswerFile
from viva.sdk import AveragingTrainingClient, ServiceClient, settled
from viva.training.followers import NEVER, Averaged, Current, Every, Follower, OutsideJudge
from viva.training.service import EngineConfig

if TYPE_CHECKING:
    from viva.recipes.evaluation.target import Target
    from viva.recipes.plan import Plan

_RECORD = "judge_weights"
"""A key of ``config.json`` that is no option: a run goes on with the judge that it had."""


def with_checked_judge(plan: Plan, reward: Reward | None, text: str | None) -> Plan:
    """The plan with what the judge of a reward is told and the weights that it has in its record; nothing is loaded.

    `text` is what the options tell the judge.

    Raises:
        ValueError: If the engine cannot have that judge, or there is no such model.
    """
    if reward is None or (options := reward.judge) is None:
        return plan
    # a file may change, and a default, too; a reward of the user's own has its text in its code
    if reward.judge_task == "compare" and options.system_prompt in (text, comparison.JUDGE_SYSTEM_PROMPT):
        plan = replace(plan, record={**plan.record, "judge_prompt": options.system_prompt})
    if options.policy == "ema" and plan.engine.engine == "remote":
        raise ValueError(
            "judge=ema needs engine=local: a server has nothing that averages weights. Use judge=every "
            "with judge_every=STEPS there"
        )
    target = find_judge(options, plan.engine)
    weights = None if target is None else target.digest
    return plan if weights is None else replace(plan, record={**plan.record, _RECORD: weights})


def find_judge(options: JudgeOptions | None, engine: EngineConfig) -> Target | None:
    """The model that judges, if it is another than the policy; `ValueError` if it or an endpoint's key is missing."""
    if options is None:
        return None
    if options.endpoint is not None:
        options.endpoint.key()
    return None if options.model is None else judge_target(options, engine)


def with_eval_judge(plan: Plan) -> Plan:
    """The plan with who compares answers to test prompts with those before training.

    Left out, the policy before training does it where no test prompt has a known answer.

    Raises:
        ValueError: If there is no such model, or there are no test prompts.
    """
    name, is_open = plan.config.eval_judge, all(item.answer is None for item in plan.test)
    is_evaluated = bool(plan.test and plan.config.eval_every)
    if name == NOBODY or (name is None and not (is_evaluated and is_open)):
        return plan
    if not is_evaluated:
        raise ValueError(
            f"eval_judge={name} would change nothing: there are no test prompts, or eval_every=0 says that they are "
            "never asked; give test_prompts_path=FILE and leave eval_every out"
        )
    if name is None or name == "initial":
        return replace(plan, eval_judge=JudgeOptions(policy="initial"))
    if name in POLICIES or "://" in name:
        raise ValueError(
            f"eval_judge must be initial (the policy before training), another model, a run, or none, so that all of a "
            f"run's evaluations have one judge on this machine; got {name}. `viva eval RUN judge=...` takes others"
        )
    check_policy(name, "eval_judge")
    judge = JudgeOptions(policy=name)
    weights = judge_target(judge, plan.engine, "eval_judge").digest
    record = plan.record if weights is None else {**plan.record, "eval_judge_weights": weights}
    return replace(plan, eval_judge=judge, record=record)


def judge_target(options: JudgeOptions, engine: EngineConfig, option: str = "judge") -> Target:
    """The model that judges, as ``viva eval`` finds it; messages name the option that gave it.

    Raises:
        ValueError: If there is none, or it lies where the engine cannot read it.
    """
    from viva.recipes.evaluation.target import find_target

    name = str(options.model)
    try:
        target = find_target(name, checkpoint=options.checkpoint)
    except ValueError as error:
        raise ValueError(f"{option}={name} is no model that could judge: {error}") from error
    target.check_readable(engine, f"{option}={name}")
    return target


async def asked_by(
    reward: Reward | None, plan: Plan, opened: OpenRun
) -> tuple[Judge | None, Scorer | None, list[Follower]]:
    """Judge and scorer that a reward asks for, and what gives them their weights at each step."""
    judge, followers = None, []
    if reward is not None and reward.judge is not None:
        judge, followers = await judge_of(reward.judge, plan, opened)
    if reward is None or reward.scorer is None:
        return judge, None, followers
    scorer, more = await _scorer_of(reward.scorer, plan, opened)
    return judge, scorer, [*followers, *more]


async def _scorer_of(options: ScorerOptions, plan: Plan, opened: OpenRun) -> tuple[Scorer, list[Follower]]:
    if options.model is None:
        policy, followers = await policy_of(JudgeOptions(policy=options.policy), plan, opened, "scorer")
        return Scorer(policy, opened.renderer), followers
    client, renderer = await open_model(opened.service, resolve_model(options.model))
    kept = opened.folder.journal.client(client, f"scorer {options.model}")
    policy = PolicyRef(sampling_client=kept, timeout_s=plan.config.policy_timeout_s)
    return Scorer(policy, renderer), []


async def open_model(service: ServiceClient, model: str) -> tuple[SamplingClient, Renderer]:
    """A model as it is, beside the one that is trained, and the renderer of its own chat format."""
    client: Any = await settled(service.create_sampling_client(base_model=model))
    return client, renderer_of(client, model)


async def judge_of(options: JudgeOptions, plan: Plan, opened: OpenRun) -> tuple[Judge, list[Follower]]:
    """The judge of a run, and what gives it its weights at each step; `ValueError` if its model cannot be had."""
    if options.endpoint is not None:
        answers = AnswerFile(opened.folder.path / ANSWERS_FILE)
        endpoint = ChatEndpoint(options.endpoint, answers, usage=answers.usage())
        return EndpointJudge(endpoint, options), [OutsideJudge(endpoint, answers)]
    if options.model is not None:  # it stays as it is
        own = opened.renderer
        other, renderer = await open_judge(
            options, plan.engine, opened.service, model=plan.model, renderer=own
        )
        name = options.model if options.checkpoint is None else f"{options.model} {options.checkpoint}"
        client = opened.folder.journal.client(other, f"judge {name}")
        policy = PolicyRef(sampling_client=client, timeout_s=plan.config.policy_timeout_s)
        return options.make(policy, renderer), []
    policy, followers = await policy_of(options, plan, opened)
    return options.make(policy, opened.renderer), followers


async def initial_judge(
    plan: Plan, opened: OpenRun, text: str | None
) -> tuple[PolicySelfComparisonJudge, list[Follower]]:
    """The policy as it was at the start as a judge by label probabilities, and what gives it its weights.

    `text` is what the options tell judges.
    """
    told = comparison.JUDGE_SYSTEM_PROMPT if text is None else text
    options = JudgeOptions(policy="initial", system_prompt=told)
    policy, followers = await policy_of(options, plan, opened, "initial_judge")
    return options.make(policy, opened.renderer), followers


async def policy_of(
    options: JudgeOptions, plan: Plan, opened: OpenRun, name: str = "judge"
) -> tuple[PolicyRef, list[Follower]]:
    """The weights of the trained policy that options name, and what follows it for them.

    Weights that the run saves for it are called `name`.
    """
    policy = PolicyRef(timeout_s=plan.config.policy_timeout_s)
    journal = opened.folder.journal
    if options.policy == "current" or (options.policy == "every" and options.every == 1):
        return policy, [Current(policy)]
    if options.policy == "ema":
        client = await _averaging(opened)
        return policy, [Averaged(policy=policy, decay=options.decay, client=client, journal=journal)]
    if options.policy == "initial" and plan.load_checkpoint_path is None:
        client = await settled(opened.service.create_sampling_client(base_model=plan.model))
        policy.sampling_client = journal.client(client, "initial")
        return policy, []
    # weights that a run starts from may be gone when it goes on, so it keeps them
    every = options.every if options.policy == "every" else NEVER
    past = opened.past_selves(opened.client, plan, name=name, whose=name, every=every, most=1)
    return policy, [Every(policy=policy, past=past, max_staleness=plan.config.max_staleness)]


async def _averaging(opened: OpenRun) -> AveragingTrainingClient:
    """The run's training client, which keeps an average from the run's beginning on."""
    client: object = opened.client
    if not isinstance(client, AveragingTrainingClient):
        raise ValueError(
            f"judge=ema needs an engine that averages weights, as the local one does; {type(client).__name__} "
            "has no begin_average. Use judge=every with judge_every=STEPS"
        )
    if opened.resume_from is None:
        await client.begin_average()
    return client


async def open_judge(
    options: JudgeOptions, engine: EngineConfig, service: ServiceClient, *, model: str, renderer: Renderer
) -> tuple[SamplingClient, Renderer]:
    """Another model that judges solutions of `model`, and its chat format: that of `model` if it is the same one."""
    from viva.recipes.evaluation.target import open_policy

    target = judge_target(options, engine)
    name = target.config.get("renderer_name")
    other = await open_policy(target, engine, renderer_name=name, service=service)
    return other.client, renderer if other.model == model else other.renderer
