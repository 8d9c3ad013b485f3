"""``viva cost``: what a step of a recipe costs, from its options alone; no model is loaded and nothing is sampled."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any

import chz

from viva.conversation.prompts import counted
from viva.recipes.common import resolve_batch_size
from viva.recipes.config import RecipeConfig, parse_options
from viva.recipes.plan import at_least
from viva.scaling.counts import Call, Counter, Counts, Markers, Template, TrainedReply, count_step
from viva.scaling.groups import (
    Lengths,
    Scoring,
    Strategy,
    conversation_calls,
    judge_calls,
    problem_calls,
    solution_key,
)
from viva.scaling.hardware import Assumptions

if TYPE_CHECKING:
    from viva.recipes.conversation_preference_rl import Config as PreferenceConfig
    from viva.recipes.critique_self_play import Config as CritiqueConfig
    from viva.recipes.math_efficiency import Config as MathConfig
    from viva.recipes.protocol import Config as ProtocolConfig

_COUNTED = frozenset(
    {
        *(
            "model_name",
            "max_steps",
            "lora_rank",
            "batch_size",
            "num_agents",
            "personas",
            "max_rounds",
            "order",
        ),
        *("judge_mode", "judge_prompt", "judge_prompt_path", "tournament_pattern"),
        *("protocol", "reward"),
        *("preset", "reward_weights", "prior_precision", "revision_votes", "votes_on_own"),
        *(
            "strategies",
            "assignment",
            "group_size",
            "hint",
            "feedback",
            "train_behind",
            "keep",
            "conversation",
        ),
        *("estimator", "estimator_options", "baseline", "min_effective_share", "on_waste"),
    }
)
"""Options of recipes that are read for the count; others are told to have no part in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """How the package's text and the agents' words are counted."""

    lengths: Lengths
    count: Counter
    template: Template = field(default_factory=Template)


@chz.chz
class CostOptions:
    """Options of ``viva cost``; all others are the recipe's own."""

    recipe: str = chz.field(doc="a name that 'viva recipes' lists")
    model: list[str] = chz.field(default_factory=lambda: ["8b", "70b"], doc="8b, 70b, tiny, or model folders")
    accelerators: list[int] = chz.field(default_factory=lambda: [8, 64, 512], doc="numbers of them")
    steps: int = chz.field(default=100, doc="training steps that the hours are for")

    prompt_tokens: float = chz.field(default=150.0, doc="of a problem")
    solution_tokens: float = chz.field(default=400.0, doc="of a solution")
    remark_tokens: float = chz.field(default=60.0, doc="of a reflection, an evaluation or one critique")
    ranking_tokens: float = chz.field(default=150.0, doc="of a ranking with its reasons")
    verdict_tokens: float = chz.field(default=64.0, doc="of a verdict that the judge writes")
    chars_per_token: float = chz.field(default=4.0, doc="in the package's own prompts")

    peak_tflops: float = chz.field(default=989.0, doc="of one accelerator, in bfloat16")
    memory_gb: float = chz.field(default=80.0, doc="of one accelerator")
    bandwidth_tb: float = chz.field(default=3.35, doc="TB/s of one accelerator's memory")
    mfu_prefill: float = chz.field(default=0.5, doc="share of the peak that prompts reach")
    mfu_train: float = chz.field(default=0.35, doc="share of the peak that training reaches")
    bandwidth_share: float = chz.field(default=0.6, doc="share of the bandwidth that decoding reaches")

    @property
    def text(self) -> Text:
        """How long everything is."""
        lengths = Lengths(
            prompt=self.prompt_tokens,
            solution=self.solution_tokens,
            remark=self.remark_tokens,
            ranking=self.ranking_tokens,
            verdict=self.verdict_tokens,
        )
        return Text(lengths=lengths, count=lambda text: len(text) / self.chars_per_token)

    @property
    def assumptions(self) -> Assumptions:
        """About the accelerators."""
        return Assumptions(
            peak_tflops=self.peak_tflops,
            memory_gb=self.memory_gb,
            bandwidth_tb=self.bandwidth_tb,
            mfu_prefill=self.mfu_prefill,
            mfu_train=self.mfu_train,
            bandwidth_share=self.bandwidth_share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeCost:
    """One configuration, counted."""

    summary: str
    calls: tuple[Call, ...]
    """Of one group."""
    counts: Counts
    is_lora: bool


def parse_cost(argv: Sequence[str]) -> tuple[CostOptions, Any]:
    """Options of ``viva cost``, and the configuration of the recipe, which all other options go to.

    Raises:
        SystemExit: See `viva.recipes.config.parse_options`.
        ValueError: If there is no such recipe, or a number makes no sense.
    """
    own_names = {*chz.chz_fields(CostOptions), "help"}
    is_own = [text.partition("=")[0].lstrip("-").partition(".")[0] in own_names for text in argv]
    own = [text for text, yes in zip(argv, is_own, strict=True) if yes]
    options = parse_options(CostOptions, own)
    recipe = options.recipe.replace("-", "_")
    if recipe not in _RECIPES:
        raise ValueError(
            f"the cost of the recipe {options.recipe!r} is not known; known are {', '.join(_RECIPES)}"
        )
    lengths = ("prompt_tokens", "solution_tokens", "remark_tokens", "ranking_tokens", "verdict_tokens")
    for name in (*lengths, "chars_per_token", "steps"):
        if not 0 < getattr(options, name) < inf:
            raise ValueError(f"{name} must be above 0 and finite; got {getattr(options, name)}")
    if not options.model:
        raise ValueError("model must name at least one model, like 8b; got []")
    if not options.accelerators or min(options.accelerators) < 1:
        raise ValueError(f"accelerators must be numbers of 1 or more; got {options.accelerators}")
    theirs = [text for text, yes in zip(argv, is_own, strict=True) if not yes]
    config = parse_options(_config_class(recipe), theirs)
    at_least(config, {"lora_rank": 0})
    return _as_the_recipe_says(options, config, _names(own), _names(theirs)), config


def _as_the_recipe_says(options: CostOptions, config: Any, own: set[str], theirs: set[str]) -> CostOptions:
    """The recipe's model and number of steps, where it was given and those of ``viva cost`` were not."""
    for mine, its in (("model", "model_name"), ("steps", "max_steps")):
        if {mine} <= own and {its} <= theirs:
            raise ValueError(
                f"{mine} and {its} both say what is counted; leave one of them out ({mine} is that of viva cost, {its} "
                "that of the recipe)"
            )
    if "model_name" in theirs:
        options = chz.replace(options, model=[config.model_name])
    if "max_steps" in theirs and config.max_steps is not None:
        at_least(config, {"max_steps": 1})
        options = chz.replace(options, steps=config.max_steps)
    return options


def uncounted_options(argv: Sequence[str]) -> list[str]:
    """Names of the recipe's options in a command line that have no part in the count, in order."""
    own = set(chz.chz_fields(CostOptions))
    return sorted(name for name in _names(argv) if name.partition(".")[0] not in own | _COUNTED)


def _names(argv: Sequence[str]) -> set[str]:
    return {text.partition("=")[0].lstrip("-") for text in argv}


def recipe_cost(config: Any, text: Text) -> RecipeCost:
    """Count one step of a configuration.

    Args:
        config: A recipe's ``Config``.
        text: How long everything is.

    Raises:
        ValueError: If the configuration could not be run, or has a strategy of the user's own.
    """
    recipe = next((name for name in _RECIPES if type(config).__module__.endswith(f".{name}")), None)
    if recipe is None:
        raise ValueError(
            f"the cost of {type(config).__module__} is not known; known are {', '.join(_RECIPES)}"
        )
    return _RECIPES[recipe](config, text)


def _config_class(recipe: str) -> type[Any]:
    return importlib.import_module(f"viva.recipes.{recipe}").Config


def _preference_cost(config: PreferenceConfig, how: Text) -> RecipeCost:
    from viva.judging.comparison import VERDICT_PREFIX
    from viva.recipes.conversation_preference_rl import judge_prompt
    from viva.selfplay.round_robin import round_robin_protocol

    at_least(config, {"num_agents": 2, "max_rounds": 1})
    protocol = round_robin_protocol(config.max_rounds, order=config.order, personas=config.personas)
    calls = _conversation(protocol, config.num_agents, how)
    matches = _tournament(config.num_agents, config.max_rounds, config.tournament_pattern)
    prefill = VERDICT_PREFIX if config.judge_mode == "logprob" else None
    calls += _judge(matches, judge_prompt(config), prefill, how, calls)
    talk = f"{counted(config.num_agents, 'agent')} x {counted(config.max_rounds, 'round')} ({config.order})"
    return _of_conversations("conversation_preference_rl", talk, config, calls)


def _critique_cost(config: CritiqueConfig, how: Text) -> RecipeCost:
    from viva.judging.comparison import JUDGE_SYSTEM_PROMPT, VERDICT_PREFIX
    from viva.recipes.critique_self_play import rules_of
    from viva.selfplay.critique import critique_protocol

    is_joint = rules_of(config).fit == "joint"
    protocol = critique_protocol(
        config.num_agents,
        personas=config.personas,
        votes_on_own=config.votes_on_own,
        comparisons=is_joint and config.revision_votes == "agents",
    )
    calls = _conversation(protocol, config.num_agents, how)
    if is_joint and config.revision_votes == "judge":
        calls += _judge(_duels(config.num_agents), JUDGE_SYSTEM_PROMPT, VERDICT_PREFIX, how, calls)
    talk = f"{counted(config.num_agents, 'agent')}, {config.preset} rewards"
    return _of_conversations("critique_self_play", talk, config, calls)


def _protocol_cost(config: ProtocolConfig, how: Text) -> RecipeCost:
    from viva.judging.comparison import VERDICT_PREFIX
    from viva.recipes.protocol import protocol_of, reward_of
    from viva.rewards import Tournament

    at_least(config, {"num_agents": 1})
    protocol = protocol_of(config)
    reward = reward_of(config, protocol)
    calls = _conversation(protocol, config.num_agents, how)
    if (judge := reward.judge) is not None:
        matches = _duels(config.num_agents)
        if isinstance(reward, Tournament):
            matches = _tournament(config.num_agents, len(protocol.rounds), reward.pattern.value)
        prefill = VERDICT_PREFIX if judge.mode == "logprob" else None
        calls += _judge(matches, judge.system_prompt, prefill, how, calls)
    talk = f"{counted(config.num_agents, 'agent')}, {protocol.name}, reward {reward.name}"
    return _of_conversations("protocol", talk, config, calls)


def _of_conversations(recipe: str, talk: str, config: RecipeConfig, calls: Sequence[Call]) -> RecipeCost:
    groups = resolve_batch_size(config.batch_size, config.num_agents) // config.num_agents
    return _result(f"{recipe}: {counted(groups, 'conversation')} of {talk}", calls, groups, config.lora_rank)


def _math_cost(config: MathConfig, how: Text) -> RecipeCost:
    from viva.experts.estimation import Need
    from viva.recipes.math_efficiency import experts_of
    from viva.training.scoring import spread

    at_least(config, {"num_agents": 2, "max_rounds": 1, "group_size": 1})
    if not config.strategies:
        raise ValueError("strategies must name at least one search strategy, like iid; got []")
    experts = experts_of(config)
    needs = experts.make().needs
    scoring = Scoring(
        swapped=Need.OLD_LOGPROBS in needs or experts.make().anchors_at_sampling,
        contexts=Need.CONTEXT_LOGPROBS in needs,
    )
    strategies = [_strategy(name, config, how) for name in config.strategies]
    problems = [strategies] if config.assignment == "all" else [[strategy] for strategy in strategies]

    def calls_of(together: Sequence[Strategy], index: int = 0) -> list[Call]:
        return problem_calls(
            together,
            scoring,
            lengths=how.lengths,
            count=how.count,
            template=how.template,
            problem=("problem", index),
        )

    calls = [call for index, together in enumerate(problems) for call in calls_of(together, index)]
    samples = sum(
        config.num_agents if name == "conversation" else config.group_size for name in config.strategies
    )
    units = resolve_batch_size(config.batch_size, samples, "the samples of all strategies") // samples
    by_strategy = [
        [
            replace(call.trained, context=call.prompt)
            for call in calls_of([strategy])
            if call.trained is not None
        ]
        for strategy in strategies
    ]
    replies = [(index, reply) for index, own in enumerate(by_strategy) for reply in own * units]
    checked = [replies[place][1] for place in spread([index for index, _ in replies], experts.num_checked)]
    names = ", ".join(config.strategies)
    summary = f"{counted(units * len(problems), 'problem')}, {names}, estimator {config.estimator}"
    return _result(f"math_efficiency: {summary}", calls, units, config.lora_rank, checked)


def _strategy(name: str, config: MathConfig, how: Text) -> Strategy:
    from viva.experts.feedback import WRONG_FEEDBACK
    from viva.recipes.strategies import DEFAULT_HINT

    calls = _talk(config, how) if name == "conversation" else []
    return Strategy(
        name=name,
        group_size=config.group_size,
        hint=DEFAULT_HINT if config.hint is None else config.hint,
        said=WRONG_FEEDBACK if config.feedback == "verifier" else "",
        train_behind=config.train_behind,
        num_kept=1 if name == "best_of" and config.keep == "best" else None,
        conversation=tuple(calls),
    )


def _talk(config: MathConfig, how: Text) -> list[Call]:
    from viva.judging.comparison import JUDGE_SYSTEM_PROMPT, VERDICT_PREFIX
    from viva.selfplay.critique import critique_protocol
    from viva.selfplay.round_robin import round_robin_protocol

    if config.conversation == "critique":
        protocol = critique_protocol(config.num_agents, personas=config.personas)
        matches = _duels(config.num_agents)
    else:
        protocol = round_robin_protocol(config.max_rounds, personas=config.personas)
        matches = _tournament(config.num_agents, config.max_rounds, "all_pairs_both_ways")
    calls = _conversation(protocol, config.num_agents, how)
    return calls + _judge(matches, JUDGE_SYSTEM_PROMPT, VERDICT_PREFIX, how, calls)


def _tournament(num_agents: int, max_rounds: int, pattern: str) -> list[tuple[Hashable, Hashable]]:
    from viva.judging.comparison import TournamentPattern, pairs

    last = max_rounds - 1
    return [
        (solution_key(first, last), solution_key(second, last))
        for first, second in pairs(range(num_agents), TournamentPattern(pattern))
    ]


def _duels(num_agents: int) -> list[tuple[Hashable, Hashable]]:
    """Every agent's revised solution against its proposal, in both orders."""
    own = [(solution_key(agent_id, 0), solution_key(agent_id, 2)) for agent_id in range(num_agents)]
    return [match for first, second in own for match in ((first, second), (second, first))]


def _conversation(protocol: Any, num_agents: int, how: Text) -> list[Call]:
    return conversation_calls(
        protocol,
        num_agents,
        lengths=how.lengths,
        count=how.count,
        template=how.template,
        markers=Markers(),
    )


def _judge(
    matches: Sequence[tuple[Any, Any]],
    system_prompt: str,
    prefill: str | None,
    how: Text,
    after: Sequence[Call],
) -> list[Call]:
    from viva.judging.comparison import judge_messages

    def messages(question: str, first: str, second: str) -> list[tuple[str, str]]:
        asked = judge_messages(question, first, second, system_prompt)
        return [(str(message["role"]), str(message["content"])) for message in asked]

    return judge_calls(
        matches,
        messages=messages,
        prefill=prefill,
        lengths=how.lengths,
        count=how.count,
        template=how.template,
        wave=max(call.wave for call in after) + 1,
    )


def _result(
    summary: str,
    calls: Sequence[Call],
    groups: int,
    lora_rank: int,
    checked: Sequence[TrainedReply] = (),
) -> RecipeCost:
    return RecipeCost(
        summary=summary,
        calls=tuple(calls),
        counts=count_step(calls, groups, checked=checked),
        is_lora=lora_rank > 0,
    )


_RECIPES: dict[str, Callable[[Any, Text], RecipeCost]] = {
    "conversation_preference_rl": _preference_cost,
    "critique_self_play": _critique_cost,
    "math_efficiency": _math_cost,
    "protocol": _protocol_cost,
}
"""What counts a recipe."""
