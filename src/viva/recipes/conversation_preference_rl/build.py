"""From the options of the recipe to a run: checks first, then data, then the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import chz

from viva.conversation.prompts import persona
from viva.eval.answers import is_correct
from viva.eval.conversations import ConversationEvaluator
from viva.eval.direct import DirectEvaluator
from viva.judging.judge import PolicySelfComparisonJudge
from viva.judging.policy import PolicyRef
from viva.judging.tournament import TournamentPattern
from viva.recipes.common import (
    OpenRun,
    RunOptions,
    finish_run,
    learning_rate,
    open_run,
    resolve_batch_size,
    resolve_model,
    say,
)
from viva.recipes.conversation_preference_rl.data import load_prompts
from viva.rl.clients import settled
from viva.rl.dataset import BuilderFactory, PromptDataset
from viva.rl.probe import check_loss
from viva.rl.prompts import PromptItem, PromptOrder, prompts_digest
from viva.rl.seeds import derive_seed
from viva.rl.service import EngineConfig
from viva.rl.train import AllGroupsFailedError, Evaluator, LoopConfig, Training, train
from viva.rl.update import UpdateConfig
from viva.selfplay.round_robin import MultiAgentConversationEnvGroupBuilder

if TYPE_CHECKING:
    from viva.recipes.conversation_preference_rl.train import Config

__all__ = ["Plan", "build_training", "make_plan", "run"]

_FREE_OPTIONS = frozenset(
    {
        "behavior_if_exists",
        "log_path",
        "max_steps",
        "max_training_datapoints",
        "save_every",
        "wandb_name",
        "wandb_project",
    }
)
"""Options that do not change what any step computes; a resumed run may set them anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Checked options with the data they name."""

    config: Config
    options: RunOptions
    order: PromptOrder
    test: tuple[PromptItem, ...]


def make_plan(config: Config) -> Plan:
    """Check all options and load the prompts; no model is loaded.

    Raises:
        ValueError: For anything the user has to mend.
    """
    _check(config)
    batch_size = resolve_batch_size(config.batch_size, config.num_agents)
    train_items, test_items = load_prompts(config.sources)
    num_groups = config.max_training_datapoints // config.num_agents
    groups_per_batch = batch_size // config.num_agents
    if config.max_steps is not None:
        num_groups = min(num_groups, config.max_steps * groups_per_batch)
    engine = EngineConfig(
        engine=config.engine, base_url=config.base_url, device=config.device, precision=config.precision
    )
    order = PromptOrder(
        items=tuple(train_items), seed=config.seed, groups_per_batch=groups_per_batch, num_groups=num_groups
    )
    return Plan(
        config=config,
        options=RunOptions(
            model=resolve_model(config.model_name),
            renderer_name=config.renderer_name,
            engine=engine,
            lora_rank=config.lora_rank,
            seed=config.seed,
            log_path=Path(config.log_path).expanduser(),
            behavior_if_exists=config.behavior_if_exists,
            record={
                "recipe": "conversation_preference_rl",
                **chz.asdict(config),
                "batch_size": batch_size,
                "prompts_digest": prompts_digest(train_items, test_items),
            },
            free_options=_FREE_OPTIONS,
            num_steps=len(order),
            wandb_project=config.wandb_project,
            wandb_name=config.wandb_name,
        ),
        order=order,
        test=tuple(test_items),
    )


def _check(config: Config) -> None:
    at_least = {
        "num_agents": (config.num_agents, 2),
        "max_rounds": (config.max_rounds, 1),
        "max_tokens": (config.max_tokens, 1),
        "judge_max_tokens": (config.judge_max_tokens, 1),
        "num_substeps": (config.num_substeps, 1),
        "max_training_datapoints": (config.max_training_datapoints, config.num_agents),
        "lora_rank": (config.lora_rank, 0),
        "max_retries": (config.max_retries, 0),
        "eval_every": (config.eval_every, 0),
        "save_every": (config.save_every, 0),
        "num_test_conversations": (config.num_test_conversations, 0),
        "max_steps": (config.max_steps if config.max_steps is not None else 1, 1),
    }
    for name, (value, smallest) in at_least.items():
        if value < smallest:
            raise ValueError(f"{name} must be {smallest} or more; got {value}")
    for name in ("learning_rate", "policy_timeout_s", "temperature"):
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, or left out; got {value}")
    for name in ("eval_temperature", "grad_clip_norm"):
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be 0 or more; got {value}")
    if not 0 <= config.judge_max_off_set_mass <= 1:
        raise ValueError(f"judge_max_off_set_mass must be from 0 to 1; got {config.judge_max_off_set_mass}")
    persona(0, config.personas)


async def run(config: Config) -> int:
    """Do the whole run; the process's exit code."""
    try:
        plan = make_plan(config)
        opened = await open_run(plan.options)
        training = await build_training(plan, opened)
    except (ValueError, OSError) as error:  # OSError: a model, file or folder that cannot be read
        say(f"error: {error}")
        return 2
    _introduce(plan, training)
    try:
        is_complete = await train(training)
    except AllGroupsFailedError as error:
        say(f"error: {error}")
        return 1
    return finish_run(plan.options, opened, training, is_complete=is_complete)


async def build_training(plan: Plan, opened: OpenRun) -> Training:
    """The loop's parts for an open run."""
    config = plan.config
    if config.engine == "remote":
        await check_loss(opened.client, config.loss_fn, config.loss_fn_config)
    judge_policy = PolicyRef()
    if config.judge_policy == "initial":
        judge_policy.sampling_client = await settled(
            opened.service.create_sampling_client(base_model=plan.options.model)
        )
    judge = PolicySelfComparisonJudge(
        judge_policy,
        opened.renderer,
        mode=config.judge_mode,
        max_tokens=config.judge_max_tokens,
        max_off_set_mass=config.judge_max_off_set_mass,
    )
    make_builder = _builder_factory(config, opened, judge)
    return Training(
        config=LoopConfig(
            seed=config.seed,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            context_window=opened.context_window,
            policy_timeout_s=config.policy_timeout_s,
            max_retries=config.max_retries,
            eval_every=config.eval_every,
            save_every=config.save_every,
            update=UpdateConfig(
                learning_rate=learning_rate(
                    config.learning_rate, config.model_name, is_lora=config.lora_rank > 0
                ),
                loss_fn=config.loss_fn,
                loss_fn_config=config.loss_fn_config,
                num_substeps=config.num_substeps,
                grad_clip_norm=config.grad_clip_norm,
            ),
        ),
        client=opened.client,
        dataset=PromptDataset(order=plan.order, make_builder=make_builder),
        folder=opened.folder,
        resume_from=opened.resume_from,
        evaluators=_evaluators(plan, opened, make_builder),
        policy_refs=[judge_policy] if config.judge_policy == "current" else [],
        sinks=opened.sinks,
    )


def _builder_factory(config: Config, opened: OpenRun, judge: PolicySelfComparisonJudge) -> BuilderFactory:
    def make(item: PromptItem, seed: int) -> MultiAgentConversationEnvGroupBuilder:
        return MultiAgentConversationEnvGroupBuilder(
            question=item.question,
            answer=item.answer,
            num_agents=config.num_agents,
            max_rounds=config.max_rounds,
            renderer=opened.renderer,
            judge=judge,
            tournament_pattern=TournamentPattern(config.tournament_pattern),
            personas=config.personas,
            order=config.order,
            on_failure=config.on_failure,
            seed=seed,
            grader=is_correct,
        )

    return make


def _evaluators(plan: Plan, opened: OpenRun, make_builder: BuilderFactory) -> list[Evaluator]:
    config = plan.config
    evaluators: list[Evaluator] = []
    graded = [item for item in plan.test if item.answer is not None]
    if graded:
        temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
        evaluators.append(
            DirectEvaluator(
                items=graded,
                renderer=opened.renderer,
                seed=config.seed,
                max_tokens=config.max_tokens,
                temperature=temperature,
                context_window=opened.context_window,
            )
        )
    spoken = plan.test[: config.num_test_conversations]
    if spoken:
        evaluators.append(
            ConversationEvaluator(
                make_builders=lambda: [
                    make_builder(item, derive_seed(config.seed, "test group", index))
                    for index, item in enumerate(spoken)
                ],
                seed=config.seed,
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                context_window=opened.context_window,
                policy_timeout_s=config.policy_timeout_s,
            )
        )
    return evaluators


def _introduce(plan: Plan, training: Training) -> None:
    config, order = plan.config, plan.order
    say(
        f"{config.model_name}: {len(order)} steps of {order.groups_per_batch} conversations, "
        f"{config.num_agents} agents x {config.max_rounds} rounds; {len(order.items)} prompts "
        f"({order.num_passes:.3g} passes), {len(plan.test)} test prompts; "
        f"learning rate {training.config.update.learning_rate:.3g}; log_path={plan.options.log_path}"
    )
