"""The judges that ``judge=`` names: found before anything is sampled, opened when it is their turn."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from viva.conversation.protocol import counted
from viva.eval.rubric import (
    Criterion,
    CriterionJudge,
    EndpointCriterionJudge,
    PolicyCriterionJudge,
    read_rubric,
)
from viva.judging.comparison import Judge
from viva.judging.endpoint import ChatEndpoint, EndpointOptions, EndpointUsage
from viva.judging.endpoint_judge import EndpointJudge
from viva.judging.judge import JudgeOptions, PolicyRef
from viva.recipes.evaluation import JUDGE_OPTIONS, EvalOptions
from viva.recipes.evaluation.plan import engine_of
from viva.recipes.evaluation.target import Target, find_target, open_policy
from viva.recipes.reward import ENDPOINT_OPTIONS, is_address
from viva.run.kept_answers import AnswerFile
from viva.training.sessions import Engines

BASE, CURRENT = "base", "current"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePlan:
    """A judge that was asked for; nothing is loaded yet."""

    name: str
    """As it was given, or of the model at an endpoint; names its figures."""
    source: Target | EndpointOptions
    options: JudgeOptions

    @property
    def summary(self) -> dict[str, Any]:
        """Its entry in the file."""
        if isinstance(self.source, EndpointOptions):
            where = {"model": self.source.model, "url": self.source.url}
        else:
            of = self.source.summary
            where = {"model": of["model"], "checkpoint": of["checkpoint"]}
        return {"name": self.name, **where, "mode": self.options.mode}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJudge:
    """A judge that can be asked."""

    plan: JudgePlan
    judge: Judge
    criteria: CriterionJudge
    usage: EndpointUsage | None
    """Usage of an endpoint up to now."""
    base_url: str | None
    """Address of the server that samples."""


def plan_judges(options: EvalOptions, *, base: Target, current: Target) -> tuple[JudgePlan, ...]:
    """The judges that ``judge=`` names.

    Args:
        options: Of the evaluation.
        base: The first policy before training.
        current: The first policy.

    Raises:
        ValueError: If there is no such model or run, or an option is out of range.
    """
    find_rubric(options)
    names = [BASE] if options.judge is None else _names("judge", options.judge)
    addresses = [name for name in names if is_address(name)]
    if not addresses and (given := _given(options, ENDPOINT_OPTIONS)):
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
        else JudgePlan(
            name=name, source=_target(name, base=base, current=current), options=_how(options, "logprob")
        )
        for name in names
    ]
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


def _how(options: EvalOptions, mode: str) -> JudgeOptions:
    given = {"mode": options.judge_mode or mode, "max_tokens": options.judge_max_tokens}
    if options.judge_prompt is not None:
        given["system_prompt"] = options.judge_prompt
    return JudgeOptions.of(given)


def _target(name: str, *, base: Target, current: Target) -> Target:
    known = {BASE: base, CURRENT: current}
    if name in known:
        return known[name]
    if "://" in name and not name.startswith("tinker://"):
        raise ValueError(f"judge={name}: an endpoint's address begins with https:// or http://")
    try:
        return find_target(name)
    except ValueError as error:
        raise ValueError(
            f"judge={name}: {error}. A judge is base (the policy before training), current (the policy itself), a "
            "model, a run, saved weights, or an endpoint like https://host/v1"
        ) from error


def find_rubric(options: EvalOptions) -> tuple[Criterion, ...]:
    """The criteria of ``rubric=``; none where it is left out.

    Raises:
        ValueError: If the file holds none.
    """
    return () if options.rubric is None else read_rubric(Path(options.rubric).expanduser())


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
    return _given(options, JUDGE_OPTIONS)


def _given(options: EvalOptions, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(options, name) != getattr(EvalOptions(), name)]


@asynccontextmanager
async def opened_judges(
    plans: Sequence[JudgePlan],
    options: EvalOptions,
    engines: Engines,
    kept: Path,
) -> AsyncGenerator[list[OpenJudge]]:
    """All judges, loaded before anything is sampled.

    Args:
        plans: Of the judges.
        options: Of the evaluation.
        engines: Of the command.
        kept: File of the answers of endpoints.

    Raises:
        ValueError: If one cannot be loaded.
    """
    async with AsyncExitStack() as stack:
        opened: list[OpenJudge] = []
        for plan in plans:
            if isinstance(plan.source, EndpointOptions):
                endpoint = await stack.enter_async_context(ChatEndpoint(plan.source, AnswerFile(kept)))
                opened.append(
                    OpenJudge(
                        plan=plan,
                        judge=EndpointJudge(endpoint, plan.options),
                        criteria=EndpointCriterionJudge(endpoint, plan.options.max_tokens),
                        usage=endpoint.usage,
                        base_url=None,
                    )
                )
            else:
                opened.append(await _opened_policy(plan, plan.source, options, engines))
        yield opened


async def _opened_policy(
    plan: JudgePlan, target: Target, options: EvalOptions, engines: Engines
) -> OpenJudge:
    engine = engine_of(target, options)
    own = options.renderer_name if plan.name in (BASE, CURRENT) else None
    opened = await open_policy(
        target,
        engine,
        renderer_name=own or target.config.get("renderer_name"),
        service=engines.service(engine),
    )
    policy = PolicyRef(sampling_client=opened.client)
    return OpenJudge(
        plan=plan,
        judge=plan.options.make(policy, opened.renderer),
        criteria=PolicyCriterionJudge(policy, opened.renderer),
        usage=None,
        base_url=engine.base_url,
    )


def usage_text(plan: JudgePlan, usage: EndpointUsage) -> str:
    """One line of what an endpoint was asked and what that cost."""
    told = [
        f"judge {plan.name}: {counted(usage.requests, 'request')}, {counted(usage.kept, 'answer')} kept from before, "
        f"{usage.prompt_tokens:,} tokens read and {usage.sampled_tokens:,} sampled"
    ]
    if usage.unmetered:
        told.append(f"tokens of {counted(usage.unmetered, 'answer')} by their length, since none were told")
    if isinstance(plan.source, EndpointOptions) and plan.source.prices is not None:
        told.append(f"price {usage.price(plan.source.prices):.4f}")
    return "; ".join(told)
