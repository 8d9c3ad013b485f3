"""The branch of an evaluation without known answers: who judges, and what comes of it."""

from dataclasses import asdict, dataclass
from typing import Any

from viva.conversation.records import Solution
from viva.eval.judged import JudgedPair, figures_of_judges, judge_pairs, paired
from viva.eval.records import Evaluation, Figure
from viva.judging.base import Judge
from viva.judging.judge import JudgeOptions, PolicyRef
from viva.judging.records import ComparisonRecord, ConversationRecord, JudgeRecord, Transcript, TurnRecord
from viva.recipes.evaluation import JUDGE_OPTIONS, EvalOptions
from viva.recipes.evaluation.plan import draws_seed, engine_of
from viva.recipes.evaluation.target import Target, find_target, open_policy
from viva.sdk import ServiceClient
from viva.training.console import EvaluationConsole
from viva.training.remote import watched
from viva.training.service import EngineConfig

BASE, CURRENT = "base", "current"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePlan:
    """A judge that was asked for; nothing is loaded yet."""

    name: str
    """As it was given; names its figures."""
    target: Target
    options: JudgeOptions

    @property
    def summary(self) -> dict[str, Any]:
        """Its entry in the file."""
        of = self.target.summary
        return {
            "name": self.name,
            "model": of["model"],
            "checkpoint": of["checkpoint"],
            "mode": self.options.mode,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdicts of all judges on two policies' answers."""

    judges: tuple[dict[str, Any], ...]
    """By judge: its name, model and mode."""
    figures: dict[str, Figure]
    rows: list[dict[str, Any]]
    """Transcripts: the pairs with their verdicts, judge by judge."""
    failures: dict[str, list[str]]
    """Reasons of failed comparisons by judge."""


def judge_names(value: str | None) -> list[str]:
    """Names in ``judge=NAME`` or ``judge=[NAME,NAME]``; by default the policy before training judges.

    Raises:
        ValueError: If a name is empty or given twice.
    """
    if value is None:
        return [BASE]
    names = [
        name.strip().strip("\"'") for name in value.strip().removeprefix("[").removesuffix("]").split(",")
    ]
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(
            f"judge must name judges that differ, like judge=base or judge=[base,current]; got {value!r}"
        )
    return names


def plan_judges(options: EvalOptions, *, base: Target, current: Target) -> tuple[JudgePlan, ...]:
    """The judges that ``judge=`` names.

    Args:
        options: Of the evaluation.
        base: The first policy before training.
        current: The first policy.

    Raises:
        ValueError: If there is no such model or run, or an option is out of range.
    """
    given = {"mode": options.judge_mode, "system_prompt": options.judge_prompt}
    own = JudgeOptions.of(
        {name: value for name, value in given.items() if value is not None}
        | {"max_tokens": options.judge_max_tokens}
    )
    return tuple(
        JudgePlan(name=name, target=_target(name, base=base, current=current), options=own)
        for name in judge_names(options.judge)
    )


def _target(name: str, *, base: Target, current: Target) -> Target:
    known = {BASE: base, CURRENT: current}
    if name in known:
        return known[name]
    try:
        return find_target(name)
    except ValueError as error:
        raise ValueError(
            f"judge={name}: {error}. A judge is base (the policy before training), current (the policy itself), a "
            "model, a run, or saved weights"
        ) from error


def refuse_judge(options: EvalOptions) -> None:
    """Refuse options of a judge where nobody is judged.

    Raises:
        ValueError: With their names.
    """
    if given := judge_given(options):
        raise ValueError(
            f"{', '.join(given)} would change nothing: a judge compares two policies; give against=base or "
            "against=RUN_OR_MODEL beside it, and judge=... where the problems have known answers"
        )


def judge_given(options: EvalOptions) -> list[str]:
    """Options of a judge that are not their defaults."""
    return [name for name in JUDGE_OPTIONS if getattr(options, name) != getattr(EvalOptions(), name)]


async def have_judged(
    plans: tuple[JudgePlan, ...],
    options: EvalOptions,
    evaluations: tuple[Evaluation, Evaluation],
    services: dict[EngineConfig, ServiceClient],
) -> Judgement:
    """Have every judge compare the direct answers of two policies to the same prompts.

    Args:
        plans: Of the judges.
        options: Of the evaluation.
        evaluations: The first and the second policy's.
        services: Engines that hold a model already; those that are opened here are added.

    Raises:
        ValueError: If a judge cannot be loaded.
    """
    first, second = evaluations
    pairs_P_N = paired(first.asked, second.asked)
    seed = int(first.options["seed"])
    judged: dict[str, list[list[JudgedPair]]] = {}
    rows: list[dict[str, Any]] = []
    with EvaluationConsole() as console:
        for plan in plans:
            engine = engine_of(plan.target, options)
            async with watched(engine.base_url):
                judge = await _open(plan, engine, options, services)

                def begin(_: str, count: int, noun: str, name: str = plan.name):
                    return console.begin(f"judge {name}", count, noun)

                judged[plan.name] = await judge_pairs(judge, pairs_P_N, seed, begin)
            step = first.target.get("next_step") or 0
            rows += _rows(plan.name, judge, judged[plan.name], step, start=len(rows))
    return Judgement(
        judges=tuple(plan.summary for plan in plans),
        figures=figures_of_judges(judged, resamples=options.resamples, seed=draws_seed(first.options)),
        rows=rows,
        failures={
            name: [
                each.failure
                for pairs in found
                for pair in pairs
                for each in pair.comparisons
                if each.failure is not None
            ]
            for name, found in judged.items()
        },
    )


async def _open(
    plan: JudgePlan, engine: EngineConfig, options: EvalOptions, services: dict[EngineConfig, ServiceClient]
) -> Judge:
    own = plan.name in (BASE, CURRENT)
    opened = await open_policy(
        plan.target,
        engine,
        renderer_name=(options.renderer_name if own else None) or plan.target.config.get("renderer_name"),
        service=services.get(engine),
    )
    services[engine] = opened.service
    return plan.options.make(PolicyRef(sampling_client=opened.client), opened.renderer)


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
