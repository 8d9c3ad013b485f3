"""Evaluation of a policy: engine, samples, figures, files, tables, and the comparison with another one.

Stored evaluations are shown and compared without sampling.
"""

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import chz
from tinker_cookbook.renderers.base import Renderer

from viva.conversation.messages import counted
from viva.eval.conversations import ConversationKind, play_all
from viva.eval.direct import DirectEvaluator, ask_all, match_tokens
from viva.eval.estimates import compare, summarise
from viva.eval.figures import comparison_text, evaluation_text, figures_of
from viva.eval.records import (
    Asked,
    Costs,
    Evaluation,
    PlayedProblem,
    read_evaluation,
    write_comparison,
    write_evaluation,
    write_transcripts,
)
from viva.judging.comparison import Judge
from viva.judging.endpoint import ChatEndpoint
from viva.judging.endpoint_judge import EndpointJudge
from viva.judging.judge import JudgeOptions, PolicyRef, SamplingClient
from viva.judging.scorer import Scorer
from viva.recipes.common import resolve_model, say
from viva.recipes.evaluation import JUDGE_OPTIONS, EvalOptions
from viva.recipes.evaluation.judges import (
    CURRENT,
    Judgement,
    JudgePlan,
    have_judged,
    judge_given,
    judged_text,
    opened_judges,
    plan_judges,
    refuse_judge,
)
from viva.recipes.evaluation.plan import (
    EvalPlan,
    check_output,
    check_place,
    content_digest,
    draws_seed,
    make_plan,
    open_target,
    result_path,
)
from viva.recipes.evaluation.target import BASE, OpenPolicy, Target, find_target, untrained
from viva.recipes.judges import open_judge, open_model
from viva.recipes.loop import direct_sampler
from viva.recipes.protocol import ConversationConfig
from viva.rewards.base import Reward
from viva.run.kept_answers import ANSWERS_FILE, AnswerFile
from viva.sdk import settled
from viva.training.console import EvaluationConsole
from viva.training.records import transcript_row
from viva.training.service import Engines

_FOLDER = Path("runs/eval")
"""Results of targets that are no runs."""


async def evaluate(name: str, options: EvalOptions) -> tuple[str, Evaluation]:
    """Evaluate a run folder, model, adapter or saved weights, and compare it if that is asked for; write the files.

    Of the file of an earlier evaluation nothing is sampled: it is shown, or compared with another one.

    Returns:
        The tables and the evaluation.

    Raises:
        ValueError: For anything the user has to fix; nothing was sampled then.
        EngineError: If a server is gone.
    """
    if _is_result_file(name):
        return await _compare_files(name, options)
    other, checkpoint = options.against, options.against_checkpoint
    if other == BASE and checkpoint is None:
        other, checkpoint = name, BASE
    elif other is None and checkpoint is not None:
        other = name  # another checkpoint of the same run
    target = find_target(name, checkpoint=options.checkpoint, model_name=options.model_name)
    plan = make_plan(target, options, is_compared=other is not None)
    judges: tuple[JudgePlan, ...] = ()
    if plan.is_judged:
        judges = plan_judges(options, {BASE: untrained(target), CURRENT: target})
    else:
        refuse_judge(options)
    stored = against = None
    if other is not None and _is_result_file(other):
        stored = read_evaluation(Path(other).expanduser())
        _check_comparable(plan.record, plan.digest, stored)
    elif other is not None:
        against = find_target(other, checkpoint=checkpoint, model_name=options.model_name)
    targets = [each for each in (target, against) if each is not None]
    for each in targets[options.output is not None :]:
        check_place(_path(plan, each))
    _print_plan(plan, targets)
    kept = _path(plan, target).with_name(ANSWERS_FILE)
    async with AsyncExitStack() as stack:
        # all of them, before the first reply is sampled
        engines = await stack.enter_async_context(Engines())
        policies = [await open_target(each, options, engines) for each in targets]
        opened = await stack.enter_async_context(opened_judges(judges, options, engines, kept))
        path = _path(plan, target) if options.output is None else Path(options.output).expanduser()
        evaluation, text = await _evaluate(plan, target, policies[0], path)
        if against is not None:
            other = str(_path(plan, against))
            stored, told = await _evaluate(plan, against, policies[1], Path(other))
            text += f"\n{told}"
        if stored is not None and other is not None:
            judged = await have_judged(opened, options, evaluation, stored) if opened else Judgement()
            place = _comparison_path(path, Path(other), judged)
            text += f"\n{_compare(evaluation, stored, judged, options, place)}{place}\n"
    return text, evaluation


def _print_plan(plan: EvalPlan, targets: Sequence[Target]) -> None:
    parts = [plan.measured]
    if plan.num_unanswered:
        parts.append(f"{plan.num_unanswered} without a known answer left out")
    for kind, config in plan.conversations.items():
        parts.append(f"{len(plan.talked_about)} of them in {kind} of {counted(config.num_agents, 'agent')}")
    say("; ".join(parts))
    for target in targets:
        for name in plan.edited(target):
            say(
                f"note: {name} was edited since {target.name} was trained; what counts here is the code of now"
            )


async def _evaluate(plan: EvalPlan, target: Target, opened: OpenPolicy, path: Path) -> tuple[Evaluation, str]:
    """An evaluation and its table; both are written."""
    costs = Costs()
    async with opened.engine.watched():
        with EvaluationConsole() as console:
            evaluation, rows = await _sample(plan, target, opened, console, costs)
    figures = summarise(
        figures_of(evaluation), resamples=plan.options.resamples, seed=draws_seed(plan.record)
    )
    evaluation = replace(evaluation, figures=figures)
    write_evaluation(path, evaluation)
    if rows:
        write_transcripts(path.with_suffix(".transcripts.jsonl"), rows)
    return evaluation, f"{evaluation_text(evaluation)}{costs.seconds_text()}\n{path}\n"


async def _sample(
    plan: EvalPlan, target: Target, opened: OpenPolicy, console: EvaluationConsole, costs: Costs
) -> tuple[Evaluation, list[dict[str, object]]]:
    """An evaluation without figures, and its transcripts."""
    direct = direct_sampler(plan.shared, plan.check, opened)
    asked: tuple[Asked, ...] = ()
    greedy: tuple[Asked, ...] = ()
    played: dict[str, tuple[PlayedProblem, ...]] = {}
    metrics: dict[str, dict[str, float]] = {}
    rows: list[dict[str, object]] = []
    if plan.is_open:
        with costs.part("direct"):
            asked = await ask_all(
                opened.client, direct, plan.items, plan.shared.eval_samples, console.begin, "direct"
            )
    elif "direct" in plan.kinds:
        evaluator = DirectEvaluator(
            items=plan.items,
            direct=direct,
            num_samples=plan.shared.eval_samples,
            asks_greedy=plan.shared.eval_greedy,
        )
        with costs.part("direct"):
            answers = await evaluator.measure(opened.client, console.begin)
        asked, greedy = answers.asked, answers.greedy
        metrics["direct"] = answers.metrics()
    for kind, config in plan.conversations.items():
        async with opened_judge(config.game().reward.judge, opened, _path(plan, target)) as make_judge:
            conversations = await conversations_of(config, opened, make_judge, console)
            with costs.part(kind):
                found, outcomes, metrics[kind] = await play_all(
                    opened.client, conversations, plan.talked_about, plan.check
                )
        # a second kind of conversation counts on: step and group name a conversation
        rows += [
            transcript_row(target.next_step or 0, group, outcome)
            for group, outcome in enumerate(outcomes, len(rows))
        ]
        if plan.options.equal_tokens:
            with costs.part(f"{kind}/equal_tokens"):
                found = await match_tokens(opened.client, direct, found, asked, console.begin)
        played[kind] = found
    evaluation = Evaluation(
        target=target.summary | {"model": opened.model},
        options=plan.record,
        prompts_digest=plan.digest,
        problems=plan.measured,
        asked=asked,
        greedy=greedy,
        played=played,
        metrics=metrics,
        figures={},
        cost=costs.tokens,
    )
    return evaluation, rows


JudgeMaker = Callable[[float | None], Judge | None]
"""Makes the judge that a reward asks for, given the longest time of one comparison; ``None`` where none is asked."""


@asynccontextmanager
async def opened_judge(
    options: JudgeOptions | None, opened: OpenPolicy, path: Path
) -> AsyncGenerator[JudgeMaker]:
    """A reward's judge; answers of one behind an endpoint are kept beside `path`, the result file.

    It has the weights of the policy that is evaluated where no step says what else would judge.
    """
    if options is None:
        yield lambda timeout_s: None
    elif options.endpoint is not None:
        answers = AnswerFile(path.with_name(ANSWERS_FILE))
        async with ChatEndpoint(options.endpoint, answers) as endpoint:
            outside = EndpointJudge(endpoint, options)
            yield lambda timeout_s: outside
    else:
        client, renderer = await _judging(options, opened)
        yield lambda timeout_s: options.make(PolicyRef(sampling_client=client, timeout_s=timeout_s), renderer)


async def conversations_of(
    config: ConversationConfig, opened: OpenPolicy, make_judge: JudgeMaker, console: EvaluationConsole
) -> ConversationKind:
    """One kind of conversation with a policy, to be played on problems."""
    game = config.game()
    talking = PolicyRef(sampling_client=opened.client, timeout_s=config.policy_timeout_s)
    return ConversationKind(
        num_agents=config.num_agents,
        factory=partial(
            game.factory,
            opened.renderer,
            judge=make_judge(config.policy_timeout_s),
            scorer=await _scorer(game.reward, talking, opened),
            voter_policy=talking,
        ),
        begin=console.begin,
        sampling=config.sampling(opened.context_window),
    )


async def _judging(options: JudgeOptions, opened: OpenPolicy) -> tuple[SamplingClient, Renderer]:
    """The weights that judge, and their chat format."""
    if options.policy == "initial":
        client = await settled(opened.service.create_sampling_client(base_model=opened.model))
        return client, opened.renderer
    if options.model is None:
        return opened.client, opened.renderer
    return await open_judge(
        options, opened.engine, opened.service, model=opened.model, renderer=opened.renderer
    )


async def _scorer(reward: Reward, talking: PolicyRef, opened: OpenPolicy) -> Scorer | None:
    """The scorer that a reward asks for, if it does."""
    options = reward.scorer
    if options is None:
        return None
    if options.model is None and options.policy == "current":
        return Scorer(talking, opened.renderer)
    client, renderer = await open_model(opened.service, resolve_model(options.model or opened.model))
    policy = PolicyRef(sampling_client=client, timeout_s=talking.timeout_s)
    return Scorer(policy, renderer if options.model else opened.renderer)


def _path(plan: EvalPlan, target: Target) -> Path:
    """A name that says which weights, and differs where they are evaluated differently."""
    options = plan.options
    how = [plan.record, plan.digest, options.precision, options.renderer_name]
    if target.folder is not None:
        return target.folder / "eval" / f"{target.checkpoint}-{content_digest(*how)}.json"
    return result_path(_FOLDER, target.name, *how, target.name, target.model)


def _comparison_path(path: Path, other: Path, judged: Judgement) -> Path:
    """A file beside the first of two result files."""
    how = [{**each, "usage": None} for each in judged.judges]
    place = content_digest(str(other.resolve()), *how)  # runs have files of equal names
    return path.with_name(f"{path.stem}-against-{other.stem}-{place}.json")


def _compare(
    evaluation: Evaluation,
    against: Evaluation,
    judged: Judgement,
    options: EvalOptions,
    target: Path | None,
) -> str:
    """The tables of a comparison; written where a file is named."""
    differences = compare(
        figures_of(evaluation),
        figures_of(against),
        resamples=options.resamples,
        seed=draws_seed(evaluation.options),
    )
    differences |= judged.rubrics
    if target is not None:
        write_comparison(target, evaluation, against, {**judged.figures, **differences}, judged.judges)
    if target is not None and judged.judges:
        write_transcripts(target.with_suffix(".transcripts.jsonl"), judged.rows)
    text = comparison_text(evaluation, against, differences)
    return f"{text}\n{judged_text(judged)}" if judged.judges else text


def _is_result_file(name: str) -> bool:
    """Whether a target is the file of an earlier evaluation."""
    return name.endswith(".json") and Path(name).expanduser().is_file()


async def _compare_files(name: str, options: EvalOptions) -> tuple[str, Evaluation]:
    """Show an earlier evaluation, or compare two, refusing options that would ask for samples."""
    other = options.against
    allowed = ["against", "output", "resamples"]
    if judge_given(options):
        allowed += [*JUDGE_OPTIONS, "engine", "base_url", "device", "precision"]
    ignored = [
        key
        for key, value in chz.asdict(options).items()
        if key not in allowed and value != getattr(EvalOptions(), key)
    ]
    if ignored or (other is None and options.output is not None):
        raise ValueError(
            f"{name} is the file of an earlier evaluation, of which nothing is sampled again: only against=FILE, and "
            f"with it output=..., resamples=... and judge=..., can be given; got {', '.join(ignored) or 'output'}"
        )
    check_output(options.output)
    evaluation = read_evaluation(Path(name).expanduser())
    if other is None:
        refuse_judge(options)
        return evaluation_text(evaluation), evaluation
    if not _is_result_file(other):
        raise ValueError(
            f"{name} is the file of an earlier evaluation and can be compared with another such file only; "
            f"got against={other}"
        )
    against = read_evaluation(Path(other).expanduser())
    _check_comparable(evaluation.options, evaluation.prompts_digest, against)
    judged = Judgement()
    if options.judge is not None or options.criteria is not None:
        told = evaluation.target
        model = None if told["kind"] in ("run", "model") else told["model"]
        current = find_target(str(told["name"]), checkpoint=told.get("checkpoint"), model_name=model)
        judges = plan_judges(options, {BASE: untrained(current), CURRENT: current})
        kept = Path(name).expanduser().with_name(ANSWERS_FILE)
        async with Engines() as engines, opened_judges(judges, options, engines, kept) as opened:
            judged = await have_judged(opened, options, evaluation, against)
    else:
        refuse_judge(options)
    target = None if options.output is None else Path(options.output).expanduser()
    return _compare(evaluation, against, judged, options, target), evaluation


def _check_comparable(record: Mapping[str, object], digest: str, stored: Evaluation) -> None:
    """Refuse to compare with a stored evaluation of other problems, or by other options."""
    if stored.prompts_digest != digest:
        raise ValueError(
            f"the stored evaluation of {stored.target['name']} is of other problems; evaluate it anew"
        )
    now = json.loads(json.dumps(record))  # as the file's options were read
    then = stored.options
    names = [
        name
        # how often is drawn for intervals decides nothing, and what was not asked at temperature 0 has no figure
        for name in sorted({*now, *then} - {"resamples", "eval_greedy"})
        if now.get(name) != then.get(name)
    ]
    if names:
        told = [
            "the source of your own code has changed, or is not known of then"
            if name == "user_code"
            else f"{name} was {then.get(name)!r} and is {now.get(name)!r}"
            for name in names
        ]
        raise ValueError(
            f"the stored evaluation of {stored.target['name']} was made with other options: {', '.join(told)}"
        )
