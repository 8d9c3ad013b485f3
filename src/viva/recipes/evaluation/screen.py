"""``viva screen``: samples, file and tables of a screening."""

import io
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from viva.conversation.messages import counted
from viva.eval.conversations import play_all
from viva.eval.direct import DirectSampler
from viva.eval.figures import shown_figure, shown_interval
from viva.eval.records import Costs, PlayedProblem, cost_lines
from viva.eval.screening import (
    Criticised,
    Screener,
    Screening,
    criticised,
    have_pairs_judged,
    records_of,
    write_screening,
)
from viva.eval.screening_advice import screening_advice
from viva.eval.screening_figures import conversation_screening, screening_figures
from viva.judging.answers import AnswerCheck
from viva.judging.judge import JudgeOptions, PolicyRef, PolicySelfComparisonJudge
from viva.judging.records import ConversationRecord
from viva.recipes.common import say
from viva.recipes.config import DataOptions
from viva.recipes.data import as_asked, check_prompts_path, check_sources, load_prompts_path
from viva.recipes.evaluation import ScreenOptions, stored_options
from viva.recipes.evaluation.build import JudgeMaker, conversations_of, opened_judge
from viva.recipes.evaluation.plan import (
    check_conversation,
    check_output,
    check_place,
    engine_of,
    open_target,
    recipe_record,
    result_path,
)
from viva.recipes.evaluation.planned import CONVERSATIONS, KIND_OF, Planned
from viva.recipes.evaluation.target import OpenPolicy, Target, find_target
from viva.recipes.judges import find_judge
from viva.recipes.math_efficiency import Config as MathConfig
from viva.recipes.plan import at_least, not_negative
from viva.recipes.protocol import ConversationConfig
from viva.recipes.reward import refuse_given
from viva.rewards import find_reward
from viva.rewards.base import Reward
from viva.rewards.rubric import Rubric, rubric
from viva.rewards.solutions import SolutionReward
from viva.selfplay.user_code import find_check
from viva.training.console import EvaluationConsole
from viva.training.data import PromptItem, derive_seed, prompts_digest
from viva.training.sampling import Sampling
from viva.training.service import Engines

_FOLDER = Path("runs/screen")

_DECIDES = (
    *("num_samples", "temperature", "max_tokens", "question_template", "system_prompt"),
    *("num_pairs", "judge_answers_first", "rewards", "criteria", "conversations", "kinds"),
    *("num_agents", "max_rounds", "seed", "resamples"),
)
"""Options that stand in the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    target: Target
    items: tuple[PromptItem, ...]
    check: AnswerCheck
    rewards: dict[str, SolutionReward]
    reward: Reward | None
    """The reward of the run that is planned; ``None``: none is planned, or it pays known answers."""
    untold: SolutionReward | None
    """A planned reward of plain samples that asks a judge or scorer about all pairs of them."""
    talks: dict[str, ConversationConfig]
    """Conversations, by kind."""
    task: str
    record: dict[str, Any]
    path: Path
    """Path of the result file."""


async def screen(name: str, task: str, options: ScreenOptions, planned: Planned | None = None) -> Screening:
    """Screen a model for a task, and write the result file; its path is told.

    The model is a run folder, model, adapter or saved weights as for ``viva eval``, the task as ``train_prompts_path``.
    `planned` is the configuration of a run, whose conversations, judge and reward are screened.

    Raises:
        ValueError: For anything the user has to fix; nothing was sampled then.
        EngineError: If a server is gone.
    """
    plan = _make_plan(name, task, options, planned)
    say(
        f"{plan.task}, {counted(options.num_samples, 'try', 'tries')} each, temperature {options.temperature:g}"
    )
    async with Engines() as engines:
        opened = await open_target(plan.target, options, engines)
        async with opened.engine.watched():
            with EvaluationConsole() as console:
                screening = await _sample(plan, opened, options, console)
    write_screening(plan.path, screening)
    say(screening_text(screening).rstrip())
    say(str(plan.path))
    return screening


def _make_plan(name: str, task: str, options: ScreenOptions, planned: Planned | None) -> _Plan:
    at_least(
        options,
        {
            "num_problems": 1,
            "num_samples": 2,
            "max_tokens": 1,
            "num_pairs": 0,
            "resamples": 100,
            "conversations": 0,
        },
    )
    not_negative(options, "temperature")
    if options.temperature == 0:
        raise ValueError(
            "temperature must be positive: all tries would be the same; a greedy answer is asked anyway"
        )
    rewards = {each: _reward(each, options) for each in options.rewards}
    reward = None
    if planned is not None:
        reward = planned.group_reward() if isinstance(planned, MathConfig) else planned.game().reward
    judge = None if reward is None else reward.judge
    untold = None
    if isinstance(reward, SolutionReward) and reward.pays_samples:
        if _is_told_by_answers(reward):
            rewards[reward.name] = reward
        elif isinstance(planned, MathConfig):
            untold = reward
    is_scored = any(each.judge_task == "score" for each in rewards.values())
    if options.judge_answers_first and not options.num_pairs and not is_scored:
        raise ValueError(
            "judge_answers_first=True would change nothing: num_pairs=0 judges no pair; leave out one or the other"
        )
    if options.criteria is not None and not is_scored:
        raise ValueError(
            "criteria would change nothing: no reward scores answers by them; add rubric to rewards, or leave them out"
        )
    check_output(options.output)
    check_prompts_path("TASK", task)
    talks = _talks(options, planned)
    check = find_check(options.grader)
    target = find_target(name, checkpoint=options.checkpoint, model_name=options.model_name)
    find_judge(judge, engine_of(target, options))
    items, told = _problems(task, options, check)
    record: dict[str, Any] = {each: getattr(options, each) for each in _DECIDES} | {"grader": check.name}
    if planned is not None:
        record |= {"recipe": options.recipe, "kinds": list(talks), "rewards": list(rewards)}
        record[str(options.recipe)] = recipe_record(planned, judge)
    what = (record, prompts_digest(items), target.name, target.model)
    path = result_path(_FOLDER, f"{target.name}-{task}", *what)
    path = path if options.output is None else Path(options.output).expanduser()
    check_place(path)
    return _Plan(
        target=target,
        items=tuple(items),
        check=check,
        rewards=rewards,
        reward=reward,
        untold=untold,
        talks=talks,
        task=told,
        record=record,
        path=path,
    )


def _problems(task: str, options: ScreenOptions, check: AnswerCheck) -> tuple[list[PromptItem], str]:
    """The problems, those without a known answer left out where others have one; and what they are, in words."""
    data = DataOptions(train_prompts_path=task, question_template=options.question_template)
    check_sources(data)
    items = [as_asked(item, data) for item in load_prompts_path(task, limit=options.num_problems)]
    for item in items:
        if item.answer is not None and (why := check.refuses(item.answer)):
            raise ValueError(why)
    with_answer = [item for item in items if item.answer is not None]
    told = f"{counted(len(items), 'problem')} of {task}"
    if with_answer and len(with_answer) < len(items):
        told += f" ({len(items) - len(with_answer)} without a known answer left out)"
        items = with_answer
    return items, told


def _talks(options: ScreenOptions, planned: Planned | None) -> dict[str, ConversationConfig]:
    """The conversations: of the run that is planned, or those of the recipes by default."""
    kinds = [kind for kind in CONVERSATIONS if kind != "protocol"]
    for kind in options.kinds:
        if kind not in kinds:
            raise ValueError(f"kinds must be of {', '.join(kinds)}; got {kind!r}")
    if planned is None:
        found = _default_talks(options)
    elif options.kinds != ScreenOptions().kinds:
        raise ValueError(
            f"kinds would change nothing: recipe={options.recipe} says it; leave one of them out"
        )
    elif isinstance(planned, MathConfig):
        if options.conversations:
            raise ValueError(
                f"recipe={options.recipe} is screened by single answers; leave conversations="
                f"{options.conversations} out"
            )
        found = {}
    elif not options.conversations:
        raise ValueError(
            f"recipe={options.recipe} is screened by conversations, and conversations=0 holds none; give "
            "conversations=24, or as many as there is time for"
        )
    else:
        kind = KIND_OF[str(options.recipe)]
        found = {kind: chz.replace(planned, num_test_conversations=options.conversations)}
    for config in found.values():
        check_conversation(config)
    return found


def _default_talks(options: ScreenOptions) -> dict[str, ConversationConfig]:
    names, remedy = ["kinds", "num_agents", "max_rounds"], "give conversations=24, or leave them out"
    if not options.conversations:
        refuse_given(options, ScreenOptions(), names, "conversations=0 holds none", remedy)
        return {}
    if not options.kinds:
        raise ValueError(
            f"kinds=[] holds none of the {options.conversations} conversations that are asked for; name one, or leave "
            "conversations out"
        )
    if "conversation" not in options.kinds:
        why, remedy = "only the kind conversation has rounds to count", "add it to kinds, or leave it out"
        refuse_given(options, ScreenOptions(), ["max_rounds"], why, remedy)
    return {kind: _talk(kind, options) for kind in options.kinds}


def _talk(kind: str, options: ScreenOptions) -> ConversationConfig:
    """A conversation with the defaults of its recipe."""
    given = {name: getattr(options, name) for name in ("num_agents", "max_tokens", "temperature", "seed")}
    if kind == "conversation":
        given["max_rounds"] = options.max_rounds
    return chz.replace(stored_options(CONVERSATIONS[kind], {}), **given)


def _reward(name: str, options: ScreenOptions) -> SolutionReward:
    reward = find_reward(name)
    if isinstance(reward.inner, Rubric) and options.criteria is not None:
        reward = reward.around(rubric(options.criteria))
    if not isinstance(reward, SolutionReward) or not reward.pays_samples:
        raise ValueError(
            f"rewards must pay solutions, like majority, log_probability or shuffled; {name} pays conversations: "
            "conversations=24 holds some, and says how every reward goes with the truth in them"
        )
    if not _is_told_by_answers(reward):
        raise ValueError(
            f"rewards must be told by the answers themselves, like majority or log_probability; {name} asks a judge "
            "or scorer about all pairs of them, which a screening does not: its advice on tournament says what "
            "the judge can be trusted with, and conversations=24 how every reward goes with the truth in some"
        )
    return reward


def _is_told_by_answers(reward: SolutionReward) -> bool:
    """Whether a screening can say what it pays: it judges one pair of a problem, and asks no scorer."""
    return reward.scorer is None and (reward.judge is None or reward.judge_task != "compare")


async def _sample(
    plan: _Plan, opened: OpenPolicy, options: ScreenOptions, console: EvaluationConsole
) -> Screening:
    costs = Costs()
    played: dict[str, tuple[PlayedProblem, ...]] = {}
    records: dict[str, tuple[ConversationRecord, ...]] = {}
    critics: tuple[Criticised, ...] = ()
    async with AsyncExitStack() as stack:
        asked = None if plan.reward is None else plan.reward.judge
        make_judge = await stack.enter_async_context(opened_judge(asked, opened, plan.path))
        screener = _screener(plan, opened, make_judge, options)
        with costs.part("answers"):
            problems = await screener.ask(opened.client, plan.items, console.begin)
        with costs.part("judged pairs"):
            problems = await screener.have_judged(problems, options.seed, console.begin)
        scored = [each for each in plan.rewards.values() if each.judge_task == "score"]
        if scored and plan.items[0].answer is not None:
            with costs.part("scored answers"):
                problems = await screener.have_scored(problems, scored[0], options.seed, console.begin)
        for kind, config in plan.talks.items():
            if plan.reward is None:
                asked = config.game().reward.judge
                make_judge = await stack.enter_async_context(opened_judge(asked, opened, plan.path))
            talks = await conversations_of(config, opened, make_judge, console)
            with costs.part(kind):
                played[kind], outcomes, _ = await play_all(
                    opened.client, talks, plan.items[: options.conversations], plan.check
                )
            records[kind] = records_of(outcomes)
            if kind == "critique":
                with costs.part("critics' pairs"):
                    critics = await have_pairs_judged(
                        criticised(records[kind]),
                        screener.judge,
                        options.seed,
                        most=options.num_pairs,
                        begin=console.begin,
                    )
    has_answers = plan.items[0].answer is not None
    figures = screening_figures(problems, plan.rewards, resamples=options.resamples, seed=options.seed)
    figures |= await conversation_screening(
        played, critics, records, is_known=has_answers, resamples=options.resamples, seed=options.seed
    )
    advice = screening_advice(
        figures,
        rewards=list(plan.rewards),
        talks={kind: config.game().reward.name for kind, config in plan.talks.items()},
        untold=plan.untold,
        has_answers=has_answers,
    )
    return Screening(
        target=plan.target.summary | {"model": opened.model},
        task=plan.task,
        options=plan.record,
        prompts_digest=prompts_digest(plan.items),
        has_answers=has_answers,
        problems=problems,
        played=played,
        critics=critics,
        cost=costs.tokens,
        figures=figures,
        advice=advice,
    )


def _screener(plan: _Plan, opened: OpenPolicy, make_judge: JudgeMaker, options: ScreenOptions) -> Screener:
    judge = None
    if plan.reward is None or plan.reward.judge_task != "answer":  # who only answers compares nothing
        judge = make_judge(None)
    return Screener(
        direct=DirectSampler(
            renderer=opened.renderer,
            sampling=Sampling(
                seed=derive_seed(options.seed, "screen"),
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                context_window=opened.context_window,
            ),
            system_prompt=options.system_prompt,
            check=plan.check,
        ),
        num_samples=options.num_samples,
        judge=judge
        or PolicySelfComparisonJudge(
            PolicyRef(sampling_client=opened.client),
            opened.renderer,
            JudgeOptions(max_tokens=options.max_tokens, answers_first=options.judge_answers_first),
        ),
        num_pairs=options.num_pairs,
    )


def screening_text(screening: Screening) -> str:
    """The figures and the advice as tables."""
    table = Table(
        "figure", box=SIMPLE, title=f"{screening.target['name']}: {screening.task}", title_justify="left"
    )
    for title in ("value", "95 % interval", "problems"):
        table.add_column(title, justify="right")
    for name, figure in screening.figures.items():
        value, interval = shown_figure(name, figure.value), shown_interval(name, figure)
        table.add_row(name, value, interval, str(figure.num_problems))
    advice = Table("about", "", "why", box=SIMPLE, title="Advice", title_justify="left")
    for each in screening.advice:
        advice.add_row(each.about, each.verdict, each.reason)
    written = io.StringIO()
    Console(file=written, width=120, highlight=False).print(table, advice)
    told = [line.rstrip() for line in written.getvalue().splitlines()]
    return "\n".join([*told, *_failures(screening), *cost_lines(screening.cost)]) + "\n"


def _failures(screening: Screening) -> list[str]:
    """A line about the judge's failures, if there were any."""
    compared = [each for problem in screening.problems if problem.judged for each in problem.judged.both]
    compared += [each for talk in screening.critics for each in talk.judged]
    found = [each.failure for each in (*compared, *screening.problems) if each.failure is not None]
    return [f"note: the judge failed {counted(len(found), 'time')}; the first: {found[0]}"] if found else []
