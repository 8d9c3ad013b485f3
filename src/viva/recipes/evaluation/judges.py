"""The judges that ``judge=`` names: found before anything is sampled, opened, and their verdicts on two policies."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import chz

from viva.conversation.messages import counted, text_table
from viva.conversation.records import ReplyStatus, Solution, Turn
from viva.eval.estimates import compare
from viva.eval.figures import shown_figure, shown_interval
from viva.eval.judged import JudgedPair, figures_of_judges, judge_pairs, paired
from viva.eval.records import Difference, Evaluation, Figure
from viva.eval.rubric import Scores, rubric_figures, score_answers
from viva.judging.comparison import Judge
from viva.judging.endpoint import ChatEndpoint, EndpointOptions
from viva.judging.endpoint_judge import EndpointJudge
from viva.judging.judge import JudgeMode, JudgeOptions, PolicyRef
from viva.judging.records import (
    ComparisonRecord,
    ConversationRecord,
    Criterion,
    JudgeRecord,
    Transcript,
)
from viva.judging.rubric import criteria_of
from viva.recipes.evaluation import JUDGE_OPTIONS, EvalOptions, JudgedOptions
from viva.recipes.evaluation.plan import draws_seed, open_target
from viva.recipes.evaluation.target import BASE, Target, find_target
from viva.recipes.reward import ENDPOINT_OPTIONS, is_address
from viva.run.kept_answers import AnswerFile
from viva.training.console import Begin, EvaluationConsole
from viva.training.service import EngineConfig, Engines

CURRENT = "current"
"""The policy itself as a judge; `BASE` is the same before training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePlan:
    """A judge that was asked for; nothing is loaded yet."""

    name: str
    """As it was given, or of the model at an endpoint; names its figures."""
    source: Target | EndpointOptions
    options: JudgeOptions

    @property
    def summary(self) -> dict[str, object]:
        """Its entry in the file."""
        if isinstance(self.source, EndpointOptions):
            where = {"model": self.source.model, "url": self.source.url}
        else:
            where = {"model": self.source.model, "checkpoint": self.source.checkpoint}
        default = JudgeOptions()
        how = {
            name: getattr(self.options, name)
            for name in ("system_prompt", "max_tokens", "answers_first")
            if getattr(self.options, name) != getattr(default, name)
        }
        return {"name": self.name, **where, "mode": self.options.mode, **how}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJudge:
    """A judge that can be asked."""

    plan: JudgePlan
    judge: Judge
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The engine that it samples on; that of this process for an endpoint, which has none."""


def plan_judges(options: JudgedOptions, own: Mapping[str, Target]) -> tuple[JudgePlan, ...]:
    """The judges that ``judge=`` names; `own` has the policy itself under `CURRENT`, and under `BASE` before training.

    Raises:
        ValueError: If there is no such model or run, or an option is out of range.
    """
    _criteria(options)
    names = [BASE] if options.judge is None else _names("judge", options.judge)
    addresses = [name for name in names if is_address(name)]
    if not addresses and (given := judge_given(options, ENDPOINT_OPTIONS)):
        raise ValueError(
            f"{', '.join(given)} would change nothing: no judge is behind an endpoint; give "
            "judge=https://host/v1 or judge=http://127.0.0.1:PORT/v1"
        )
    models = [] if options.judge_model is None else _names("judge_model", options.judge_model)
    if addresses and len(models) not in (1, len(addresses)):
        raise ValueError(
            f"judge_model must name the model at {' and at '.join(addresses)}; got {options.judge_model!r}"
        )
    at = dict(zip(addresses, models * len(addresses), strict=False))
    plans = [
        JudgePlan(name=at[name], source=options.endpoint(name, at[name]), options=_how(options, "verdict"))
        if name in at
        else JudgePlan(name=name, source=_target(name, own), options=_how(options, "logprob"))
        for name in names
    ]
    for plan in plans:
        if isinstance(plan.source, EndpointOptions):
            plan.source.key()
    if len({plan.name for plan in plans}) < len(plans):  # one model at two addresses
        plans = [replace(plan, name=name.rstrip("/")) for plan, name in zip(plans, names, strict=True)]
    return tuple(plans)


def _names(option: str, value: str) -> list[str]:
    """Names in ``option=NAME`` or ``option=[NAME,NAME]``."""
    inner = value.strip().removeprefix("[").removesuffix("]")
    names = [name.strip().strip("\"'") for name in inner.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"{option} must be a name, or names that differ, like [A,B]; got {value!r}")
    return names


def _how(options: JudgedOptions, mode: JudgeMode) -> JudgeOptions:
    how = JudgeOptions(
        mode=options.judge_mode or mode,
        max_tokens=options.judge_max_tokens,
        answers_first=options.judge_answers_first,
    )
    return how if options.judge_prompt is None else replace(how, system_prompt=options.judge_prompt)


def _target(name: str, own: Mapping[str, Target]) -> Target:
    if name in own:
        return own[name]
    if "://" in name and not name.startswith("tinker://"):
        raise ValueError(f"judge={name}: an endpoint's address begins with https:// or http://")
    try:
        return find_target(name)
    except ValueError as error:
        raise ValueError(
            f"judge={name}: {error}. A judge is base (the policy before training), current (the policy itself), a "
            "model, a run, saved weights, or an endpoint like https://host/v1"
        ) from error


def _criteria(options: JudgedOptions) -> tuple[Criterion, ...]:
    return () if options.criteria is None else criteria_of(options.criteria)


def refuse_judge(options: EvalOptions) -> None:
    """Refuse options of a judge where nobody is judged."""
    if given := judge_given(options):
        raise ValueError(
            f"{', '.join(given)} would change nothing: a judge compares two policies; give against=base or "
            "against=RUN_OR_MODEL beside it, and judge=... where the problems have known answers"
        )


def judge_given(options: JudgedOptions, names: Sequence[str] = JUDGE_OPTIONS) -> list[str]:
    """Options of a judge that are not their defaults."""
    return [name for name in names if getattr(options, name) != getattr(JudgedOptions(), name)]


@asynccontextmanager
async def opened_judges(
    plans: Sequence[JudgePlan], options: JudgedOptions, engines: Engines, kept: Path
) -> AsyncGenerator[list[OpenJudge]]:
    """All judges, loaded before anything is sampled; answers of endpoints are kept in the file `kept`."""
    async with AsyncExitStack() as stack:
        opened: list[OpenJudge] = []
        for plan in plans:
            if isinstance(plan.source, EndpointOptions):
                endpoint = await stack.enter_async_context(ChatEndpoint(plan.source, AnswerFile(kept)))
                judge = EndpointJudge(endpoint, plan.options)
                opened.append(OpenJudge(plan=plan, judge=judge))
            else:
                is_other = plan.name not in (BASE, CURRENT)
                own = chz.replace(options, renderer_name=None) if is_other else options
                policy = await open_target(plan.source, own, engines)
                judge = plan.options.make(PolicyRef(sampling_client=policy.client), policy.renderer)
                opened.append(OpenJudge(plan=plan, judge=judge, engine=policy.engine))
        yield opened


def usage_text(name: str, endpoint: ChatEndpoint) -> str:
    """One line of what an endpoint was asked and what that cost."""
    usage, prices = endpoint.usage, endpoint.options.prices
    told = [
        f"judge {name}: {counted(usage.requests, 'request')}, {counted(usage.kept, 'answer')} kept from before, "
        f"{usage.prompt_tokens:,} tokens read and {usage.sampled_tokens:,} sampled"
    ]
    if usage.unmetered:
        told.append(f"tokens of {counted(usage.unmetered, 'answer')} by their length, since none were told")
    if prices is not None:
        told.append(f"price {usage.price(prices):.4f}")
    return "; ".join(told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdicts of all judges on two policies' answers; empty where nobody judged."""

    judges: Sequence[dict[str, object]] = ()
    """By judge: its name, model and mode; of an endpoint also what was asked."""
    figures: dict[str, Figure] = field(default_factory=dict[str, Figure])
    rubrics: dict[str, Difference] = field(default_factory=dict[str, Difference])
    """Scores of both policies' answers, where there is a rubric."""
    rows: Sequence[dict[str, Any]] = ()
    """Transcripts: the pairs with their verdicts, judge by judge."""
    notes: Sequence[str] = ()
    """Lines about costs and failed comparisons."""


async def have_judged(
    judges: Sequence[OpenJudge], options: EvalOptions, first: Evaluation, second: Evaluation
) -> Judgement:
    """Have every judge compare the direct answers of two policies to the same prompts.

    Raises:
        ValueError: If a judge could be asked about none of them: where others have the same words, those would be all
            that is counted.
    """
    criteria = _criteria(options)
    pairs_P_N = paired(first.asked, second.asked)
    seed = int(first.options["seed"])
    step = int(first.target.get("next_step") or 0)
    judged: dict[str, list[list[JudgedPair]]] = {}
    entries: list[dict[str, object]] = []
    rows: list[dict[str, Any]] = []
    notes: list[str] = [f"criterion_{place}: {each.text}" for place, each in enumerate(criteria, 1)]
    rubrics: dict[str, Difference] = {}
    with EvaluationConsole() as console:
        for opened in judges:
            plan = opened.plan
            begin = _titled(console.begin, f"judge {plan.name}")
            async with opened.engine.watched():
                judged[plan.name] = await judge_pairs(opened.judge, pairs_P_N, seed, begin)
                _check_asked(plan.name, judged[plan.name])
                begin = _titled(console.begin, "rubric")
                scores = [
                    await score_answers(opened.judge, criteria, each.asked, seed, begin)
                    for each in ((first, second) if criteria else ())
                ]
            own = _rows(plan.name, opened.judge, judged[plan.name], step, start=len(rows))
            if criteria:
                _add_scores(own, criteria, scores)
                rubrics |= {
                    f"rubric/{plan.name}/{name}": each
                    for name, each in compare(
                        *(rubric_figures(each, criteria) for each in scores),
                        resamples=options.resamples,
                        seed=draws_seed(first.options),
                    ).items()
                }
            rows += own
            entries.append(
                plan.summary | ({} if options.criteria is None else {"criteria": options.criteria})
            )
            if isinstance(opened.judge, EndpointJudge):
                entries[-1]["usage"] = asdict(opened.judge.endpoint.usage)
                notes.append(usage_text(plan.name, opened.judge.endpoint))
            notes += _failures(plan.name, judged[plan.name], scores)
    return Judgement(
        judges=entries,
        figures=figures_of_judges(judged, resamples=options.resamples, seed=draws_seed(first.options)),
        rubrics=rubrics,
        rows=rows,
        notes=notes,
    )


def _check_asked(name: str, pairs_P_N: Sequence[Sequence[JudgedPair]]) -> None:
    """Refuse to go on if every comparison that a judge was asked for failed."""
    asked = [each for pairs in pairs_P_N for pair in pairs for each in pair.asked]
    failures = [each.failure for each in asked if each.failure is not None]
    if failures and len(failures) == len(asked):
        raise ValueError(
            f"the judge {name} could be asked about none of {counted(len(asked), 'comparison')}, so there is no win "
            f"rate; the first failure: {failures[0]}. The answers are kept: viva eval FIRST.json against=SECOND.json "
            "judge=... asks about them again"
        )


def _titled(begin: Begin, title: str) -> Begin:
    return lambda _, count, noun: begin(title, count, noun)


def _add_scores(rows: list[dict[str, Any]], criteria: Sequence[Criterion], scores: Sequence[Scores]) -> None:
    """Put the criteria, and every answer's scores by agent, into its pair's record."""
    flat = [[answer for prompt in each for answer in prompt] for each in scores]
    for row, *both in zip(rows, *flat, strict=True):
        row["record"]["criteria"] = [asdict(each) for each in criteria]
        row["record"]["rubric"] = {
            str(agent): [score.value for score in scores_C] for agent, scores_C in enumerate(both)
        }


def _failures(name: str, pairs_P_N: list[list[JudgedPair]], scores: Sequence[Scores]) -> list[str]:
    """Lines about what failed, if anything did."""
    compared = [each.failure for pairs in pairs_P_N for pair in pairs for each in pair.comparisons]
    scored = [each.failure for policy in scores for prompt in policy for answer in prompt for each in answer]
    return [
        f"note: {counted(len(found), noun)} by {name} failed; the first: {found[0]}"
        for noun, asked in (("comparison", compared), ("score", scored))
        if (found := [failure for failure in asked if failure is not None])
    ]


def _rows(
    name: str, judge: Judge, pairs_P_N: list[list[JudgedPair]], step: int, *, start: int
) -> list[dict[str, Any]]:
    """A transcript for every pair: the first policy is agent 0, the second agent 1."""
    described = JudgeRecord.model_validate(judge.described())
    rows: list[dict[str, Any]] = []
    for group, pair in enumerate((pair for pairs in pairs_P_N for pair in pairs), start):
        points = sum(pair.points) / len(pair.points) if pair.points else 0.5
        record = ConversationRecord(
            question=pair.question,
            answer=pair.known,
            protocol="two policies",
            num_agents=2,
            max_rounds=1,
            order="simultaneous",
            judge=described,
            turns=tuple(
                Turn(
                    agent_id=place,
                    round_index=0,
                    prompt="",
                    text=each.text,
                    response=Solution(solution=each.text),
                    status=ReplyStatus.OK,
                )
                for place, each in enumerate(pair.answers)
            ),
            comparisons=tuple(ComparisonRecord(**asdict(each)) for each in pair.comparisons),
            rewards={0: 2 * points - 1, 1: 1 - 2 * points},
            correct=None
            if pair.known is None
            else {place: each.right for place, each in enumerate(pair.answers)},
        )
        transcript = Transcript(
            step=step,
            group=group,
            strategy=f"judge {name}",
            rewards=tuple(record.rewards.values()),
            record=record,
        )
        rows.append(transcript.model_dump(mode="json"))
    return rows


_LEGEND = {
    "win_rate": "win_rate: points of the first policy, a tie counting half; shown_first, shown_second: by its place; "
    "length_controlled: at equal length; expected: by the judge's probabilities",
    "flip_rate": "flip_rate: winners that change with the order; first_shown_rate: verdicts for the answer shown "
    "first; longer_rate: for the longer one; 50 % of these two is no preference",
    "failed_rate": "invalid_rate, failed_rate: of comparisons asked; they count for nobody",
    "accuracy": "accuracy: verdicts for the right answer, of a right and a wrong one; pair_accuracy: pairs whose "
    "scores of both orders together favour it",
    "kappa": "agreement, kappa: of both judges, pair by pair (Cohen's kappa: 0 is chance)",
}


def judged_text(judged: Judgement) -> str:
    """The figures as tables, with a column for each judge, and notes below."""
    figures, judges = judged.figures, [str(each["name"]) for each in judged.judges]
    keys = dict.fromkeys(
        each.removeprefix(f"judge/{name}/")
        for name in judges
        for each in figures
        if each.startswith(f"judge/{name}/")
    )
    rows = [("judged by", *(cell for name in judges for cell in (name, "95 % interval")), "prompts")]
    for key in keys:
        found = [figures.get(f"judge/{name}/{key}") for name in judges]
        most = max(figure.num_problems for figure in found if figure is not None)
        rows.append((key, *(cell for figure in found for cell in _cells(key, figure)), str(most)))
    lines = text_table(rows)
    between = [(name, figure) for name, figure in figures.items() if name.startswith("judges/")]
    if between:
        told = [("between judges", "value", "95 % interval", "prompts")]
        told += [
            (name.removeprefix("judges/"), *_cells(name, figure), str(figure.num_problems))
            for name, figure in between
        ]
        lines += ["", *text_table(told)]
    lines += ["", *(text for mark, text in _LEGEND.items() if any(mark in name for name in figures))]
    return "\n".join([*lines, *judged.notes]) + "\n"


def _cells(name: str, figure: Figure | None) -> tuple[str, str]:
    return ("-", "-") if figure is None else (shown_figure(name, figure.value), shown_interval(name, figure))
