"""An evaluation without known answers: judges compare two policies' answers, and what comes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from viva.conversation.messages import text_table
from viva.conversation.protocol import counted
from viva.conversation.records import Solution
from viva.eval.estimates import compare
from viva.eval.figures import shown_figure, shown_interval
from viva.eval.judged import JudgedPair, figures_of_judges, judge_pairs, paired
from viva.eval.records import Difference, Evaluation, Figure
from viva.eval.rubric import Criterion, Scores, rubric_figures, score_answers
from viva.judging.comparison import Judge
from viva.judging.records import ComparisonRecord, ConversationRecord, JudgeRecord, Transcript, TurnRecord
from viva.recipes.evaluation import EvalOptions
from viva.recipes.evaluation.judges import OpenJudge, find_rubric, usage_text
from viva.recipes.evaluation.plan import draws_seed
from viva.training.console import Begin, EvaluationConsole
from viva.training.remote import watched


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdicts of all judges on two policies' answers."""

    judges: tuple[dict[str, Any], ...]
    """By judge: its name, model and mode; of an endpoint also what was asked."""
    figures: dict[str, Figure]
    rubrics: dict[str, Difference]
    """Scores of both policies' answers, where there is a rubric."""
    rows: list[dict[str, Any]]
    """Transcripts: the pairs with their verdicts, judge by judge."""
    notes: tuple[str, ...]
    """Lines about costs and failed comparisons."""


async def have_judged(
    judges: Sequence[OpenJudge], options: EvalOptions, evaluations: tuple[Evaluation, Evaluation]
) -> Judgement:
    """Have every judge compare the direct answers of two policies to the same prompts.

    Args:
        judges: Open ones.
        options: Of the evaluation.
        evaluations: The first and the second policy's.
    """
    first, second = evaluations
    criteria = find_rubric(options)
    pairs_P_N = paired(first.asked, second.asked)
    seed = int(first.options["seed"])
    step = int(first.target.get("next_step") or 0)
    judged: dict[str, list[list[JudgedPair]]] = {}
    entries: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    notes: list[str] = [f"criterion_{place}: {each.text}" for place, each in enumerate(criteria, 1)]
    rubrics: dict[str, Difference] = {}
    with EvaluationConsole() as console:
        for opened in judges:
            plan = opened.plan
            begin = _titled(console.begin, f"judge {plan.name}")
            async with watched(opened.base_url):
                judged[plan.name] = await judge_pairs(opened.judge, pairs_P_N, seed, begin)
                scores = await _scored(opened, criteria, evaluations, seed, console.begin)
            own = _rows(plan.name, opened.judge, judged[plan.name], step, start=len(rows))
            if criteria:
                _add_scores(own, scores)
                rubrics |= {
                    f"rubric/{plan.name}/{name}": each
                    for name, each in compare(
                        *(rubric_figures(each, criteria) for each in scores),
                        resamples=options.resamples,
                        seed=draws_seed(first.options),
                    ).items()
                }
            rows += own
            entries.append(plan.summary)
            if opened.usage is not None:
                entries[-1]["usage"] = asdict(opened.usage)
                notes.append(usage_text(plan, opened.usage))
            notes += _failures(plan.name, judged[plan.name], scores)
    return Judgement(
        judges=tuple(entries),
        figures=figures_of_judges(judged, resamples=options.resamples, seed=draws_seed(first.options)),
        rubrics=rubrics,
        rows=rows,
        notes=tuple(notes),
    )


def _titled(begin: Begin, title: str) -> Begin:
    return lambda _, count, noun: begin(title, count, noun)


async def _scored(
    opened: OpenJudge,
    criteria: Sequence[Criterion],
    evaluations: tuple[Evaluation, Evaluation],
    seed: int,
    begin: Begin,
) -> list[Scores]:
    """Scores of both policies' answers, if there is a rubric."""
    return [
        await score_answers(opened.criteria, criteria, each.asked, seed, _titled(begin, "rubric"))
        for each in (evaluations if criteria else ())
    ]


def _add_scores(rows: list[dict[str, Any]], scores: Sequence[Scores]) -> None:
    """Put every answer's scores into its pair's record, by agent."""
    flat = [[answer for prompt in each for answer in prompt] for each in scores]
    for row, *both in zip(rows, *flat, strict=True):
        row["record"]["rubric"] = {
            str(agent): [score.value for score in scores_C] for agent, scores_C in enumerate(both)
        }


def _failures(name: str, pairs_P_N: list[list[JudgedPair]], scores: Sequence[Scores]) -> list[str]:
    """Lines about what failed, if anything did."""
    reasons = [
        each.failure
        for pairs in pairs_P_N
        for pair in pairs
        for each in pair.comparisons
        if each.failure is not None
    ]
    asked = [score for each in scores for prompt in each for answer in prompt for score in answer]
    failed = [score.failure for score in asked if score.failure is not None]
    return [
        f"note: {counted(len(found), noun)} by {name} failed; the first: {found[0]}"
        for noun, found in (("comparison", reasons), ("score", failed))
        if found
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
                TurnRecord(
                    agent_id=place, round_index=0, text=each.text, response=Solution(solution=each.text)
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
    "accuracy": "accuracy: verdicts for the right answer, of a right and a wrong one",
    "kappa": "agreement, kappa: of both judges, pair by pair (Cohen's kappa: 0 is chance)",
}


def judged_text(figures: Mapping[str, Figure], judges: Sequence[str], notes: Sequence[str]) -> str:
    """The figures of `viva.eval.judged.figures_of_judges` as tables.

    Args:
        figures: By name.
        judges: Names, in the order of the columns.
        notes: Lines below them.
    """
    keys = [
        name.removeprefix(f"judge/{judges[0]}/") for name in figures if name.startswith(f"judge/{judges[0]}/")
    ]
    keys += [
        key
        for name in judges[1:]
        for each in figures
        if each.startswith(f"judge/{name}/") and (key := each.removeprefix(f"judge/{name}/")) not in keys
    ]
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
    return "\n".join([*lines, *notes]) + "\n"


def _cells(name: str, figure: Figure | None) -> tuple[str, str]:
    return ("-", "-") if figure is None else (shown_figure(name, figure.value), shown_interval(name, figure))
