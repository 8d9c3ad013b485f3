"""``viva screen``: samples, file and tables of a screening."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz

from viva.conversation.messages import counted
from viva.eval.conversations import play_all
from viva.eval.direct import DirectSampler
from viva.eval.figures import shown_figure, shown_interval
from viva.eval.records import Costs, Played, cost_lines
from viva.eval.screening import (
    Criticised,
    Screener,
    Screening,
    criticised,
    have_pairs_judged,
    write_screening,
)
from viva.eval.screening_advice import screening_advice
from viva.eval.screening_figures import conversation_screening, screening_figures
from viva.judging.answers import AnswerCheck
from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge
from viva.recipes.common import say
from viva.recipes.config import DataOptions
from viva.recipes.data import as_asked, check_prompts_path, check_sources, load_prompts_path
from viva.recipes.evaluation import ScreenOptions, stored_options
from viva.recipes.evaluation.build import conversations_of
from viva.recipes.evaluation.plan import (
    CONVERSATIONS,
    check_conversation,
    check_output,
    check_place,
    open_target,
    result_path,
)
from viva.recipes.evaluation.target import OpenPolicy, Target, find_target
from viva.recipes.plan import at_least, not_negative
from viva.recipes.protocol import ConversationConfig
from viva.rewards import find_reward
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
    talks: dict[str, ConversationConfig]
    """Conversations, by kind."""
    task: str
    record: dict[str, Any]
    path: Path
    """Path of the result file."""


async def screen(name: str, task: str, options: ScreenOptions) -> Screening:
    """Screen a model for a task, and write the result file; its path is told.

    The model is a run folder, model, adapter or saved weights as for ``viva eval``, the task as ``train_prompts_path``.

    Raises:
        ValueError: For anything the user has to fix; nothing was sampled then.
        EngineError: If a server is gone.
    """
    plan = _make_plan(name, task, options)
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


def _make_plan(name: str, task: str, options: ScreenOptions) -> _Plan:
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
    talks = {kind: _talk(kind, options) for kind in options.kinds} if options.conversations else {}
    check = find_check(options.grader)
    target = find_target(name, checkpoint=options.checkpoint, model_name=options.model_name)
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
    record = {each: getattr(options, each) for each in _DECIDES} | {"grader": check.name}
    what = (record, prompts_digest(items), target.name, target.model)
    path = result_path(_FOLDER, f"{target.name}-{task}", *what)
    path = path if options.output is None else Path(options.output).expanduser()
    check_place(path)
    return _Plan(
        target=target,
        items=tuple(items),
        check=check,
        rewards=rewards,
        talks=talks,
        task=told,
        record=record,
        path=path,
    )


def _talk(kind: str, options: ScreenOptions) -> ConversationConfig:
    """A conversation with the defaults of its recipe."""
    if kind not in ("conversation", "critique"):
        raise ValueError(f"kinds must be of conversation, critique; got {kind!r}")
    given = {name: getattr(options, name) for name in ("num_agents", "max_tokens", "temperature", "seed")}
    if kind == "conversation":
        given["max_rounds"] = options.max_rounds
    config = chz.replace(stored_options(CONVERSATIONS[kind], {}), **given)
    check_conversation(config)
    return config


def _reward(name: str, options: ScreenOptions) -> SolutionReward:
    reward = find_reward(name)
    if isinstance(reward.inner, Rubric) and options.criteria is not None:
        reward = reward.around(rubric(options.criteria))
    if not isinstance(reward, SolutionReward) or not reward.pays_samples:
        raise ValueError(
            f"rewards must pay solutions, like majority, log_probability or shuffled; {name} pays conversations"
        )
    return reward


async def _sample(
    plan: _Plan, opened: OpenPolicy, options: ScreenOptions, console: EvaluationConsole
) -> Screening:
    screener = Screener(
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
        judge=PolicySelfComparisonJudge(
            PolicyRef(sampling_client=opened.client),
            opened.renderer,
            max_tokens=options.max_tokens,
            answers_first=options.judge_answers_first,
        ),
        num_pairs=options.num_pairs,
    )
    costs = Costs()
    with costs.part("answers"):
        problems = await screener.ask(opened.client, plan.items, console.begin)
    with costs.part("judged pairs"):
        problems = await screener.have_judged(problems, options.seed, console.begin)
    scored = [each for each in plan.rewards.values() if each.judge_task == "score"]
    if scored and plan.items[0].answer is not None:
        with costs.part("scored answers"):
            problems = await screener.have_scored(problems, scored[0], options.seed, console.begin)
    played: dict[str, tuple[Played, ...]] = {}
    critics: tuple[Criticised, ...] = ()
    for kind, config in plan.talks.items():
        async with conversations_of(config, opened, console, plan.path) as talks:
            with costs.part(kind):
                played[kind], outcomes, _ = await play_all(
                    opened.client, talks, plan.items[: options.conversations], plan.check
                )
        if kind == "critique":
            found = criticised(outcomes)
            with costs.part("critics' pairs"):
                critics = await have_pairs_judged(
                    found, screener.judge, options.seed, most=options.num_pairs, begin=console.begin
                )
    has_answers = plan.items[0].answer is not None
    figures = screening_figures(problems, plan.rewards, resamples=options.resamples, seed=options.seed)
    figures |= conversation_screening(
        played, critics, is_known=has_answers, resamples=options.resamples, seed=options.seed
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
        advice=screening_advice(figures, rewards=list(plan.rewards), has_answers=has_answers),
    )


def screening_text(screening: Screening) -> str:
    """The figures and the advice as tables."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

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
    return "\n".join([*told, *cost_lines(screening.cost)]) + "\n"
