"""From the options of the recipe to a run: checks first, then data, then the engine."""

from __future__ import annotations

from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING

from tinker_cookbook.renderers.base import Renderer

from viva.conversation.wording import counted
from viva.eval.answers import is_correct
from viva.judging import comparison
from viva.judging.judge import PolicySelfComparisonJudge
from viva.judging.policy import PolicyRef
from viva.judging.tournament import TournamentPattern
from viva.recipes.common import OpenRun
from viva.recipes.loop import judged_by, make_training, run_recipe
from viva.recipes.plan import Plan, at_least, plan_run
from viva.rewards.base import Grader
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.selfplay.round_robin import round_robin_group
from viva.training.data import BuilderFactory, PromptItem
from viva.training.loop import Training

if TYPE_CHECKING:
    from viva.recipes.conversation_preference_rl.train import Config

__all__ = ["build_training", "check_conversation", "conversation_factory", "judge_prompt", "make_plan", "run"]


def make_plan(config: Config) -> Plan[Config]:
    """Check all options and load the prompts; no model is loaded.

    Raises:
        ValueError: For anything the user has to mend.
    """
    check_conversation(config)
    return plan_run(
        config,
        recipe="conversation_preference_rl",
        summary=f"{counted(config.num_agents, 'agent')} x {counted(config.max_rounds, 'round')}",
        record={"judge_prompt": judge_prompt(config)},
    )


def check_conversation(config: Config) -> None:
    """Check the options that only this recipe has.

    Raises:
        ValueError: For the first that is out of range.
    """
    at_least(config, {"max_rounds": 1, "judge_max_tokens": 1})
    if not 0 <= config.judge_max_off_set_mass <= 1:
        raise ValueError(f"judge_max_off_set_mass must be from 0 to 1; got {config.judge_max_off_set_mass}")
    judge_prompt(config)


def judge_prompt(config: Config) -> str:
    """What the judge is told: the text, the file's, or the package's.

    Raises:
        ValueError: If there are two texts, or none can be read.
    """
    if config.judge_prompt is not None and config.judge_prompt_path is not None:
        raise ValueError("give judge_prompt or judge_prompt_path, not both")
    if config.judge_prompt_path is None:
        text = comparison.JUDGE_SYSTEM_PROMPT if config.judge_prompt is None else config.judge_prompt
    else:
        text = _text_of(Path(config.judge_prompt_path).expanduser())
    if not text.strip():
        raise ValueError(
            "judge_prompt must be text that is not empty; it must ask for a JSON object with preference"
        )
    return text


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"judge_prompt_path={path} cannot be read as UTF-8 text: {error}") from error


async def run(config: Config) -> Signals | None:
    """Do the whole run, see `viva.recipes.loop.run_recipe`."""
    return await run_recipe(lambda: make_plan(config), build_training)


async def build_training(plan: Plan[Config], opened: OpenRun) -> Training:
    """The loop's parts for an open run."""
    config = plan.config
    judge_policy, policy_refs = await judged_by(config.judge_policy, plan, opened)
    make_builder = conversation_factory(
        config, opened.renderer, judge_policy, system_prompt=plan.options.record["judge_prompt"]
    )
    return make_training(plan, opened, make_builder, policy_refs=policy_refs)


def conversation_factory(
    config: Config,
    renderer: Renderer,
    judge_policy: PolicyRef,
    *,
    system_prompt: str,
    grader: Grader = is_correct,
) -> BuilderFactory:
    """Makes the recipe's conversation for a prompt and a seed.

    Args:
        config: The options.
        renderer: Of the policy that talks and judges.
        judge_policy: Who judges.
        system_prompt: What the judge is told, see `judge_prompt`.
        grader: Tells for the metrics whether a solution is right.
    """
    judge = PolicySelfComparisonJudge(
        judge_policy,
        renderer,
        mode=config.judge_mode,
        system_prompt=system_prompt,
        max_tokens=config.judge_max_tokens,
        max_off_set_mass=config.judge_max_off_set_mass,
    )

    def make_builder(item: PromptItem, seed: int) -> MultiAgentConversationEnvGroupBuilder:
        return round_robin_group(
            question=item.question,
            answer=item.answer,
            num_agents=config.num_agents,
            max_rounds=config.max_rounds,
            renderer=renderer,
            judge=judge,
            tournament_pattern=TournamentPattern(config.tournament_pattern),
            personas=config.personas,
            order=config.order,
            on_failure=config.on_failure,
            seed=seed,
            grader=grader,
        )

    return make_builder
