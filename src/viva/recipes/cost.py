"""``viva cost``: what a step of a recipe costs, from its options alone; no model is loaded and nothing is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from operator import mul
from pathlib import Path

import chz
from tinker_cookbook.renderers.base import Message

from viva.conversation.messages import counted, text_table
from viva.conversation.protocol import Protocol, Round
from viva.conversation.roles import Roles
from viva.judging import comparison
from viva.judging.comparison import (
    VERDICT_PREFIX,
    TournamentPattern,
    judge_messages,
    pairs,
)
from viva.judging.judge import JudgeOptions
from viva.judging.reasoning_gym import is_generated
from viva.judging.rubric import CRITERION_PREFIX, criterion_messages
from viva.judging.scorer import scorer_messages
from viva.recipes.common import resolve_batch_size
from viva.recipes.config import RecipeConfig, make_options, option_name, parse_options, read_options
from viva.recipes.data import load_jsonl
from viva.recipes.evaluation.planned import ANSWERING, Planned
from viva.recipes.math_efficiency import Config as MathConfig
from viva.recipes.plan import at_least, not_negative
from viva.recipes.programs import recipe_named
from viva.recipes.protocol import Config as ProtocolConfig
from viva.recipes.protocol import ConversationConfig, Game
from viva.rewards.base import Reward
from viva.rewards.rubric import Rubric
from viva.scaling.counts import Call, Counts, Passes, TrainedReply, count_step
from viva.scaling.groups import (
    Lengths,
    Scoring,
    Strategy,
    Text,
    answer_call,
    conversation_calls,
    judge_calls,
    problem_calls,
    scorer_calls,
    solution_key,
)
from viva.scaling.hardware import (
    PRESETS,
    Assumptions,
    ModelShape,
    cache_bytes,
    read_shape,
    step_flops,
    step_time,
)
from viva.tiny import model_path
from viva.training.service import cached_config

COUNTED = frozenset(
    (
        *("model_name", "max_steps", "lora_rank", "batch_size", "max_tokens"),
        *("num_agents", "personas", "max_rounds", "order"),
        *("judge", "judge_model", "judge_prices", "judge_mode", "judge_prompt", "judge_prompt_path"),
        "judge_max_tokens",
        *("judge_answers_first", "tournament_pattern", "protocol", "policies", "control", "prompts"),
        *("reward", "criteria", "scorer_policy", "scorer_model", "initial_judge_pairs"),
        *("preset", "reward_weights", "prior_precision", "solution_floor"),
        *("revision_votes", "votes_on_own", "ballots"),
        *("strategies", "assignment", "group_size", "hint", "feedback", "train_behind", "keep"),
        *("conversation", "conversation_reward"),
        *("kl_penalty_coef", "estimator", "estimator_options", "baseline", "min_effective_share", "on_waste"),
        *("test_prompts_path", "max_test_samples", "num_test_conversations"),
        *("eval_every", "eval_samples", "eval_greedy", "eval_temperature"),
    )
)
"""Options of recipes that are read for the count; others are told to have no part in it."""


@chz.chz
class CostOptions(Lengths, Assumptions):
    """Options of ``viva cost``; all others are the recipe's own."""

    recipe: str = chz.field(doc="a name that 'viva recipes' lists, or path.py:PROTOCOL")
    model: list[str] = chz.field(default_factory=lambda: ["8b", "70b"], doc="8b, 70b, tiny, or model folders")
    accelerators: list[int] = chz.field(default_factory=lambda: [8, 64, 512], doc="numbers of them")
    steps: int = chz.field(default=100, doc="training steps that the hours are for")

    chars_per_token: float = chz.field(default=4.0, doc="in the package's own prompts")

    @property
    def text(self) -> Text:
        """Lengths of prompts and replies."""
        return Text(lengths=self, count=lambda text: len(text) / self.chars_per_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationCost:
    """One evaluation on the test prompts of a file, but for a judge's comparisons of answers to them."""

    every: int
    """Steps from one to the next."""
    num_answers: int
    """Direct ones."""
    num_conversations: int
    tokens: float
    """Read and sampled, every prompt in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeCost:
    """One configuration, counted."""

    summary: str
    calls: tuple[Call, ...]
    """Calls of one group, but for those of an endpoint."""
    counts: Counts
    is_lora: bool
    asked: str = "judge"
    """In words, the model that the reward asks."""
    prices: tuple[float, float] | None = None
    """Prices of a million tokens read and of a million sampled by a judge behind an endpoint."""
    evaluation: EvaluationCost | None = None
    """``None``: no file of test prompts is named, or they are never asked."""


def parse_cost(argv: Sequence[str]) -> tuple[CostOptions, Planned]:
    """Options of ``viva cost``, and the configuration of the recipe, which all other options go to.

    Raises:
        SystemExit: See `viva.recipes.config.parse_options`.
        ValueError: If there is no such recipe, or a number makes no sense.
    """
    own_names = {*chz.chz_fields(CostOptions), "help"}
    own = [text for text in argv if option_name(text) in own_names]
    theirs = [text for text in argv if option_name(text) not in own_names]
    options = parse_options(CostOptions, own)
    recipe, protocol = recipe_named(options.recipe, ANSWERING)
    theirs += [f"{name}={value}" for name, value in protocol.items()]
    for name in (*chz.chz_fields(Lengths), "chars_per_token", "steps"):
        if not 0 < getattr(options, name) < inf:
            raise ValueError(f"{name} must be above 0 and finite; got {getattr(options, name)}")
    if not options.model:
        raise ValueError("model must name at least one model, like 8b; got []")
    if not options.accelerators or min(options.accelerators) < 1:
        raise ValueError(f"accelerators must be numbers of 1 or more; got {options.accelerators}")
    config = parse_options(ANSWERING[recipe], theirs, recipe)
    at_least(config, {"lora_rank": 0})
    files = [text.partition("=")[2] for text in theirs if option_name(text) == "config"]
    filed = {name for file in files for name in read_options(file, ANSWERING[recipe], recipe)}
    named = set(map(option_name, own)), set(map(option_name, theirs))
    return _as_the_recipe_says(options, config, *named, filed), config


def _as_the_recipe_says(
    options: CostOptions, config: Planned, own: set[str], theirs: set[str], filed: set[str]
) -> CostOptions:
    """The recipe's model and number of steps, where they were given, in a file, too, and ``viva cost``'s own were not.

    Arguments are names of options: `own` of ``viva cost``, `theirs` of the recipe, `filed` of it in a file.
    """
    for mine, its in (("model", "model_name"), ("steps", "max_steps")):
        if mine in own and its in theirs:
            raise ValueError(
                f"{mine} and {its} both say what is counted; leave one of them out ({mine} is that of viva cost, {its} "
                "that of the recipe)"
            )
    given = theirs | filed
    if "model_name" in given and "model" not in own:
        options = chz.replace(options, model=[config.model_name])
    if "max_steps" in given and "steps" not in own and config.max_steps is not None:
        at_least(config, {"max_steps": 1})
        options = chz.replace(options, steps=config.max_steps)
    return options


def uncounted_options(config: Planned) -> list[str]:
    """Names of the options that are not at their defaults and have no part in the count, in order."""
    needed = {"protocol": config.protocol} if isinstance(config, ProtocolConfig) else {}
    defaults = make_options(type(config), needed)
    changed = (name for name in chz.chz_fields(config) if getattr(config, name) != getattr(defaults, name))
    return sorted(set(changed) - COUNTED)


def recipe_cost(config: Planned, text: Text) -> RecipeCost:
    """One step of a recipe's configuration, counted; `text` says how long everything is.

    Raises:
        ValueError: If the configuration could not be run, or has a strategy of the user's own.
    """
    not_negative(config, "kl_penalty_coef")
    at_least(config, {"max_tokens": 1})
    text = replace(text, longest=config.max_tokens)
    cost = _math_cost(config, text) if isinstance(config, MathConfig) else _conversation_cost(config, text)
    return replace(cost, evaluation=_evaluation_cost(config, text))


def _evaluation_cost(config: Planned, text: Text) -> EvaluationCost | None:
    bounds = {"eval_every": 0, "eval_samples": 1, "num_test_conversations": 0, "max_test_samples": 1}
    at_least(config, bounds)
    path = config.test_prompts_path
    if path is None or is_generated(path) or not config.eval_every:
        return None
    items = load_jsonl(path, limit=config.max_test_samples)
    talk: Sequence[Call] = ()
    num_policies = 1
    if not isinstance(config, MathConfig):
        game = config.game()
        roles = config.roles(game)
        talk, num_policies = _game_calls(game, text, roles), 1 if roles is None else len(roles.trained)
    elif config.talks:
        talk = _game_calls(config.game(), text)
    samples = 1 if config.direct_temperature == 0 else config.eval_samples + config.eval_greedy
    num_answers = sum(item.answer is not None for item in items) * samples * num_policies
    num_conversations = min(len(items), config.num_test_conversations) if talk else 0
    return EvaluationCost(
        every=config.eval_every,
        num_answers=num_answers,
        num_conversations=num_conversations,
        tokens=num_answers * _tokens([answer_call(text, 0, text.longest)])
        + num_conversations * _tokens(talk),
    )


def _tokens(calls: Sequence[Call]) -> float:
    """Tokens that calls read and sample."""
    return sum(call.reply + sum(block.tokens for block in call.prompt) for call in calls)


def _conversation_cost(config: ConversationConfig, text: Text) -> RecipeCost:
    at_least(config, {"num_agents": 2, "initial_judge_pairs": 0})
    groups = resolve_batch_size(config.batch_size, config.num_agents) // config.num_agents
    game = config.game()
    roles = config.roles(game)
    calls = _game_calls(game, text, roles, trains_all=bool(config.kl_penalty_coef))
    calls += _initial_judge_calls(config, game, text, max(call.wave for call in calls))
    told = "" if roles is None else f", {counted(len(roles.trained), 'trained policy', 'trained policies')}"
    recipe = type(config).__module__.rpartition(".")[2]
    summary = f"{recipe}: {counted(groups, 'conversation')} of {config.summary()}{told}"
    return _step_cost(summary, calls, groups, config, game.reward)


def _step_cost(
    summary: str,
    calls: Sequence[Call],
    groups: int,
    config: RecipeConfig,
    reward: Reward | None,
    checked: Sequence[TrainedReply] = (),
) -> RecipeCost:
    endpoint = None if reward is None or reward.judge is None else reward.judge.endpoint
    if config.kl_penalty_coef:
        calls = [_scored_by_reference(call) for call in calls]
    return RecipeCost(
        summary=summary,
        calls=tuple(call for call in calls if call.role != "outside"),
        counts=count_step(calls, groups, checked=checked),
        is_lora=config.lora_rank > 0,
        asked="judge" if reward is None or reward.scorer is None else "scorer",
        prices=None if endpoint is None else endpoint.prices,
    )


def _scored_by_reference(call: Call) -> Call:
    """The call of a KL penalty's run: what is trained where it was sampled, the reference scores."""
    if call.trained is None or call.trained.context != call.prompt:
        return call
    return replace(call, scored=(*call.scored, call.trained))


def _game_calls(
    game: Game, text: Text, roles: Roles | None = None, *, trains_all: bool = False
) -> list[Call]:
    """The calls of agents, then those of the models that the reward asks for."""
    earning = None if trains_all else game.reward.earning
    calls = conversation_calls(game.protocol, game.num_agents, text, roles, earning=earning)
    wave = max(call.wave for call in calls) + 1
    return calls + _asked_calls(game.reward, game.protocol, game.num_agents, text, wave)


def _initial_judge_calls(config: ConversationConfig, game: Game, text: Text, wave: int) -> list[Call]:
    """The calls of the policy at the start about pairs of final solutions."""
    last, told = len(game.protocol.rounds) - 1, config.judge_text() or comparison.JUDGE_SYSTEM_PROMPT
    chosen = pairs(range(game.num_agents), TournamentPattern.ALL_PAIRS_ONE_WAY)[: config.initial_judge_pairs]
    shown = [((one, last), (other, last)) for pair in chosen for one, other in (pair, pair[::-1])]
    return _comparison_calls(shown, JudgeOptions(system_prompt=told), text, wave)


def _comparison_calls(
    matches: Sequence[tuple[tuple[int, int], tuple[int, int]]], judge: JudgeOptions, text: Text, wave: int
) -> list[Call]:
    """The calls of a judge about pairs of solutions, each by agent and round."""
    return judge_calls(
        [(solution_key(*first), solution_key(*second)) for first, second in matches],
        messages=lambda question, shown, own: _texts(
            judge_messages(
                question, shown[0], shown[1], judge.system_prompt, own if judge.answers_first else ""
            )
        ),
        prefill=VERDICT_PREFIX if judge.mode == "logprob" else None,
        text=text,
        longest=judge.max_tokens,
        wave=wave,
    )


def _asked_calls(reward: Reward, protocol: Protocol, number: int, text: Text, wave: int) -> list[Call]:
    """The calls of judge and scorer about one group of so many solutions."""
    calls: list[Call] = []
    judge = reward.judge
    if judge is not None:
        is_shown = judge.answers_first
        behind = wave + 1 if is_shown else wave
        calls += _comparison_calls(reward.matches(protocol, number), judge, text, behind)
        for criterion in reward.inner.criteria if isinstance(reward.inner, Rubric) else ():
            calls += judge_calls(
                [(solution_key(agent, len(protocol.rounds) - 1),) for agent in range(number)],
                messages=lambda question, shown, own, asked=criterion.text: _texts(
                    criterion_messages(question, shown[0], asked, own if is_shown else "")
                ),
                prefill=CRITERION_PREFIX if judge.endpoint is None else None,
                text=text,
                longest=judge.max_tokens,
                wave=behind,
            )
        if reward.judge_task == "answer" or (is_shown and calls):
            calls.append(answer_call(text, wave, judge.max_tokens))
        if judge.endpoint is not None:
            calls = [replace(call, role="outside") for call in calls]
    if reward.scorer is not None:
        calls += scorer_calls(
            number,
            messages=lambda question, informant: _texts(scorer_messages(question, informant)),
            text=text,
            wave=wave,
        )
    return calls


def _texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(str(message["role"]), str(message["content"])) for message in messages]


def _math_cost(config: MathConfig, text: Text) -> RecipeCost:
    from viva.experts.estimation import Need
    from viva.training.scoring import spread

    at_least(config, {"num_agents": 2, "max_rounds": 1, "group_size": 1})
    if not config.strategies:
        raise ValueError("strategies must name at least one search strategy, like iid; got []")
    experts = config.experts()
    estimator = experts.make()
    scoring = Scoring(
        swapped=Need.OLD_LOGPROBS in estimator.needs or estimator.anchors_at_sampling,
        contexts=Need.CONTEXT_LOGPROBS in estimator.needs,
    )
    strategies = [_strategy(name, config, text) for name in config.strategies]
    problems = [strategies] if config.assignment == "all" else [[strategy] for strategy in strategies]
    calls = [
        call
        for index, together in enumerate(problems)
        for call in problem_calls(together, scoring, text, problem=("problem", index))
    ]
    reward = config.group_reward()
    if reward is not None:  # of plain samples, the only strategy then
        samples = Protocol(name="samples", rounds=(Round("sample", "Solve."),))
        calls += _asked_calls(reward, samples, config.group_size, text, max(call.wave for call in calls) + 1)
    unit = config.unit(config.strategies)
    units = resolve_batch_size(config.batch_size, unit.samples, unit.name) // unit.samples
    replies = [
        (index, replace(call.trained, context=call.prompt))
        for index, strategy in enumerate(strategies)
        for call in problem_calls([strategy], scoring, text, problem=("problem", 0)) * units
        if call.trained is not None
    ]
    checked = [replies[place][1] for place in spread([index for index, _ in replies], experts.num_checked)]
    named = f"{', '.join(config.strategies)}, estimator {config.estimator}"
    summary = f"math_efficiency: {counted(units * len(problems), 'problem')}, {named}"
    return _step_cost(
        summary, calls, units, config, config.game().reward if config.talks else reward, checked
    )


def _strategy(name: str, config: MathConfig, text: Text) -> Strategy:
    from viva.experts.assisted import WRONG_FEEDBACK
    from viva.recipes.strategies import DEFAULT_HINT

    return Strategy(
        name=name,
        group_size=config.group_size,
        hint=DEFAULT_HINT if config.hint is None else config.hint,
        said=WRONG_FEEDBACK if config.feedback == "verifier" else "",
        train_behind=config.train_behind,
        num_kept=1 if name == "best_of" and config.keep == "best" else None,
        conversation=tuple(_game_calls(config.game(), text)) if name == "conversation" else (),
    )


def cost_text(cost: RecipeCost, options: CostOptions) -> str:
    """Tokens of a step, then FLOPs, memory and hours of every model.

    Raises:
        ValueError: If a model or an assumption makes no sense.
    """
    shapes = [_shape(name) for name in options.model]
    update = "adapter" if cost.is_lora else "all weights"
    hours = (f"hours of {counted(options.steps, 'step')}", *("prefill", "decode", "score", "train", "all"))
    parts = [
        [f"{cost.summary}; {update} trained"],
        text_table([("tokens per step", "each by itself", "prefixes once", "saved"), *_token_rows(cost)]),
        text_table(
            [("per step", "PFLOP", "with reuse", "cache GB", "with reuse"), *_work_rows(cost, shapes)]
        ),
        text_table(
            [
                (*hours, "without reuse"),
                *(row for shape in shapes for row in _hour_rows(cost, shape, options)),
            ]
        ),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _shape(name: str) -> ModelShape:
    """Shape of a preset, a folder, the built-in policy, or a hub's model that was loaded before."""
    if name == "tiny":
        return replace(read_shape(str(model_path())), name=name)
    found = None if name in PRESETS or Path(name).expanduser().is_dir() else cached_config(name)
    return read_shape(name) if found is None else replace(read_shape(str(found.parent)), name=name)


def _token_rows(cost: RecipeCost) -> list[tuple[str, ...]]:
    counts = cost.counts
    rows: list[tuple[str, ...]] = [
        (f"sampled, {counted(counts.num_calls, 'reply', 'replies')}", f"{counts.sampled:,.0f}", "", "")
    ]
    if counts.judged:
        rows.append(
            (f"sampled, {counts.num_judge_calls} by the {cost.asked}", f"{counts.judged:,.0f}", "", "")
        )
    rows.append(("prompts of agents", *_passes(counts.prompts)))
    if counts.num_judge_calls:
        rows.append((f"prompts of the {cost.asked}", *_passes(counts.judge_prompts)))
    if counts.num_outside_calls:
        price = ""
        if cost.prices is not None:
            price = f", price {sum(map(mul, counts.outside, cost.prices)) / 1e6:,.4f}"
        answers = counted(counts.num_outside_calls, "answer")
        rows.append((f"{answers} of the endpoint{price}", f"{sum(counts.outside):,.0f}", "", ""))
    rows.append(("read and sampled in all", f"{counts.total:,.0f}", "", ""))
    if counts.scored.rows.tokens:
        rows.append(("scored before the update", *_passes(counts.scored)))
    rows.append((f"trained, {counts.num_datums} datums", *_passes(counts.trained)))
    if (once := cost.evaluation) is not None:
        asked = [counted(once.num_answers, "answer")]
        asked += [counted(once.num_conversations, "conversation")] if once.num_conversations else []
        title = f"an evaluation, every {counted(once.every, 'step')}: {', '.join(asked)}"
        rows.append((title, f"{once.tokens:,.0f}", "", ""))
    return rows


def _passes(passes: Passes) -> tuple[str, str, str]:
    return f"{passes.rows.tokens:,.0f}", f"{passes.tree.tokens:,.0f}", f"{passes.saved:.0%}"


def _work_rows(cost: RecipeCost, shapes: Sequence[ModelShape]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for shape in shapes:
        flops = [step_flops(cost.counts, shape, reuse=reuse, is_lora=cost.is_lora) for reuse in (False, True)]
        cache = [
            cache_bytes(cost.calls, cost.counts.num_groups, shape, reuse=reuse) for reuse in (False, True)
        ]
        name = f"{shape.name}, {shape.parameters / 1e9:.3g} B parameters"
        rows.append(
            (name, *(f"{each / 1e15:,.1f}" for each in flops), *(f"{each / 1e9:,.1f}" for each in cache))
        )
    return rows


def _hour_rows(cost: RecipeCost, shape: ModelShape, options: CostOptions) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for number in options.accelerators:
        timed = partial(step_time, cost.calls, cost.counts, shape, number, assumptions=options)
        once, each = (timed(reuse=reuse, is_lora=cost.is_lora) for reuse in (True, False))
        title = f"{shape.name} on {number}"
        if once is None or each is None:
            rows.append((title, *["does not fit"] * 6))
            continue
        seconds = (once.prefill, once.decode, once.score, once.train, once.total, each.total)
        rows.append((title, *(f"{figure * options.steps / 3600:.2f}" for figure in seconds)))
    return rows
