"""From a recipe's options to a checked plan of its run: all that can be wrong is told before a model is loaded."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import chz

from viva.conversation.protocol import persona
from viva.hub import pinned, split_revision
from viva.judging.answers import AnswerCheck
from viva.judging.judge import JudgeOptions
from viva.recipes.common import RunOptions, learning_rate, resolve_batch_size, resolve_model
from viva.recipes.config import DEFAULT_DATAPOINTS, RecipeConfig
from viva.recipes.data import generated_record, load_prompts
from viva.recipes.judges import with_eval_judge
from viva.run.files import METRICS_FILE, read_json_lines
from viva.run.trackers import choose_trackers
from viva.selfplay.user_code import find_check, source_digests
from viva.training.data import PromptItem, PromptOrder, prompts_digest
from viva.training.service import EngineConfig, choose_engine

_SHORTEST_TTL = 24 * 3600
"""A run that stopped overnight has to find its checkpoint."""

_LARGEST_COUNT = 10**9
_LARGEST = {
    "batch_size": 10**6,
    "lora_rank": 10**4,
    "max_retries": 10**4,
    "max_training_datapoints": 10**12,
    "num_agents": 1000,
    "num_epochs": 10**6,
    "num_substeps": 10**6,
}
"""Beyond these, a number is a slip: no machine has the memory or the years."""

_LARGEST_SEED = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUnit:
    """The smallest batch a recipe can train on."""

    samples: int
    """Trajectories."""
    prompts: int = 1
    """Prompts that one unit answers together."""
    name: str = "num_agents"
    """Option that sets the number of samples, for messages."""
    groups: str = "conversations"
    """Plural noun for units, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(RunOptions):
    """Checked options with the data they name."""

    config: RecipeConfig
    order: PromptOrder[PromptItem]
    test: tuple[PromptItem, ...]
    summary: str
    """One conversation in words, like ``3 agents x 5 rounds``."""
    unit: BatchUnit
    learning_rate: float
    check: AnswerCheck
    """The check of answers, where they are known."""
    eval_judge: JudgeOptions | None = None
    """The judge that compares answers to test prompts with those before training."""

    def check_length(self, run: Path, num_made: int) -> None:
        """Refuse (`ValueError`) also a length where the last batch was a part of one: its rest is never played."""
        super(Plan, self).check_length(run, num_made)  # a class with slots has no bare super()
        # those behind the checkpoint may be damaged
        rows = list(islice(read_json_lines(run / METRICS_FILE), num_made))
        if not rows or "rollout/groups" not in rows[0]:  # examples to imitate
            return
        first, last = (row["rollout/groups"] for row in (rows[0], rows[-1]))
        full, wanted = self.order.groups_per_batch, len(self.order.batch(num_made - 1))
        by_prompt = max(first / full, 1)  # several strategies may answer every prompt
        if last < wanted * by_prompt:
            raise ValueError(
                f"the last step of the run in {run} had {last / by_prompt:g} of {full} prompts, as it ended there; "
                f"in the longer run it would have {wanted}, and the others would never be played. Give the length that "
                "it had, or go on in a new run: another log_path, with load_checkpoint_path for the weights"
            )


def plan_run(
    config: RecipeConfig,
    *,
    recipe: str,
    summary: str,
    record: Mapping[str, Any] | None = None,
    unit: BatchUnit | None = None,
    items: tuple[Sequence[PromptItem], list[PromptItem]] | None = None,
) -> Plan:
    """Check the options that all recipes have and load the prompts; a recipe checks its own ones first.

    `record` has entries of ``config.json`` beside, or instead of, the options as they were given. By default, `unit` is
    one conversation of ``num_agents``, and `items`, to train and to test on, are those that the options name.

    Raises:
        ValueError: For anything the user has to fix.
    """
    _check(config)
    unit = unit or BatchUnit(samples=config.num_agents)
    at_least(config, {"max_training_datapoints": unit.samples})
    batch_size = resolve_batch_size(config.batch_size, unit.samples, unit.name)
    train_items, test_items = items or load_prompts(config)
    groups_per_batch = batch_size // unit.samples * unit.prompts
    order = PromptOrder(
        items=train_items,
        seed=config.seed,
        groups_per_batch=groups_per_batch,
        num_groups=_num_groups(config, unit, groups_per_batch, len(train_items)),
    )
    model = resolve_model(config.model_name, config.model_revision)
    engine = _engine(config, model)
    name, is_local = pinned(config.model_name, config.model_revision), engine.server is None
    check, record = find_check(config.grader), record or {}
    code = {**record.get("user_code", {}), **source_digests(config.grader)}
    plan = Plan(
        config=config,
        model=model,
        renderer_name=config.renderer_name,
        engine=engine,
        lora_rank=config.lora_rank,
        seed=config.seed,
        log_path=Path(config.log_path).expanduser(),
        behavior_if_exists=config.behavior_if_exists,
        record={
            "recipe": recipe,
            **chz.asdict(config),
            **record,
            **({"user_code": code} if code else {}),
            **generated_record(config),
            "engine": engine.engine,
            "batch_size": batch_size,
            "prompts_digest": prompts_digest(train_items, test_items),
        },
        free_options=config.free_options(),
        num_steps=len(order),
        trackers=choose_trackers(
            config.trackers, wandb_project=config.wandb_project, wandb_name=config.wandb_name
        ),
        load_checkpoint_path=config.load_checkpoint_path,
        ttl_seconds=None if is_local else config.ttl_seconds,
        order=order,
        test=tuple(test_items),
        summary=summary,
        unit=unit,
        learning_rate=learning_rate(
            config.learning_rate, name, is_lora=config.lora_rank > 0, is_local=is_local
        ),
        check=check,
    )
    return with_eval_judge(plan)


def _num_groups(config: RecipeConfig, unit: BatchUnit, groups_per_batch: int, num_prompts: int) -> int:
    """Groups of the whole run: of so many passes or trajectories, and of no more than so many steps."""
    if config.num_epochs is None:
        num_groups = config.max_training_datapoints // unit.samples * unit.prompts
    elif config.max_training_datapoints != DEFAULT_DATAPOINTS:
        raise ValueError(
            f"num_epochs={config.num_epochs:g} and max_training_datapoints={config.max_training_datapoints} both say "
            "how long the run is; leave one of them out (max_steps may stand beside either)"
        )
    else:
        num_groups = math.ceil(config.num_epochs * num_prompts / unit.prompts) * unit.prompts
    return num_groups if config.max_steps is None else min(num_groups, config.max_steps * groups_per_batch)


def _engine(config: RecipeConfig, model: str) -> EngineConfig:
    chosen = choose_engine(config.engine, base_url=config.base_url, model=model)
    if chosen == "remote" and split_revision(model)[1] is not None:
        raise ValueError(
            f"a server has one revision of {config.model_name} and cannot be asked for {model}; leave model_revision "
            "out, or compute here (engine=local)"
        )
    overlapping = [name for name in ("max_staleness", "stream_updates") if getattr(config, name)]
    if chosen == "local" and overlapping:
        raise ValueError(
            f"{overlapping[0]}={getattr(config, overlapping[0])} lets an engine sample and train at the same time, "
            "which needs engine=remote; the local one does one thing at a time, and training a batch as a whole is "
            "faster"
        )
    return EngineConfig(
        engine=chosen,
        base_url=config.base_url,
        device=config.device,
        precision=config.precision,
    )


def _check(config: RecipeConfig) -> None:
    from viva.engine.losses import find_loss  # a second of modules, which viva cost does without

    if not config.log_path.strip():
        raise ValueError(f"log_path must be the path of a folder, like runs/first; got {config.log_path!r}")
    smallest = {
        "num_agents": 2,
        "max_tokens": 1,
        "num_substeps": 1,
        "lora_rank": 0,
        "max_retries": 0,
        "eval_every": 0,
        "eval_samples": 1,
        "save_every": 0,
        "tokens_every": 0,
        "num_test_conversations": 0,
        "max_steps": 1,
        "max_staleness": 0,
        "ttl_seconds": _SHORTEST_TTL,
    }
    at_least(config, smallest)
    if config.batch_size is not None and config.batch_size > _LARGEST["batch_size"]:
        raise ValueError(f"batch_size must be {_LARGEST['batch_size']:,} or less; got {config.batch_size:,}")
    if not -_LARGEST_SEED <= config.seed < _LARGEST_SEED:
        raise ValueError(f"seed must be a whole number of at most 63 bits; got {config.seed}")
    positive(config, "learning_rate", "policy_timeout_s", "temperature", "num_epochs")
    if config.num_epochs is not None and config.num_epochs > _LARGEST["num_epochs"]:
        raise ValueError(f"num_epochs must be {_LARGEST['num_epochs']:,} or less; got {config.num_epochs:,}")
    not_negative(config, "eval_temperature", "grad_clip_norm", "kl_penalty_coef")
    _check_penalty(config)
    persona(0, config.personas)
    # the local engine's definition holds for remote ones too: `viva.doctor` compares them with it
    find_loss(config.loss_fn).settings(config.loss_fn, config.loss_fn_config)


def _check_penalty(config: RecipeConfig) -> None:
    """Refuse a KL penalty on what it could not be measured of."""
    if not config.kl_penalty_coef:
        return
    from viva.training.update import trained_temperature

    told = None
    trained_at = trained_temperature(config.loss_fn_config)
    if config.temperature != 1 or trained_at != 1:
        told = f"needs samples and a loss at temperature 1; got {config.temperature:g} and {trained_at:g}"
    elif config.stream_updates:
        told = "is taken from the mean over a whole batch; leave out stream_updates"
    if told is not None:
        raise ValueError(f"kl_penalty_coef={config.kl_penalty_coef:g} {told}")


def at_least(config: Any, smallest: Mapping[str, int]) -> None:
    """Refuse options below the smallest allowed value, or beyond all sense; what is left out (``None``) passes."""
    for name, bound in smallest.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise ValueError(f"{name} must be {bound} or more; got {value}")
        if value is not None and value > (largest := _LARGEST.get(name, _LARGEST_COUNT)):
            raise ValueError(f"{name} must be {largest:,} or less; got {value:,}")


def positive(config: RecipeConfig, *names: str) -> None:
    """Refuse options that are not positive finite numbers; what is left out (``None``) passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, or left out; got {value}")


def not_negative(config: Any, *names: str) -> None:
    """Refuse options that are negative or not finite; what is left out (``None``) passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be 0 or more; got {value}")
