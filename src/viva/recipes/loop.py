"""From a plan to a run: the loop's parts, the engine, and what the user reads at the beginning and the end."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from signal import Signals
from typing import Any, cast

import tinker
from tinker_cookbook.rl.types import RLDataset

from viva.conversation.messages import counted
from viva.eval.conversations import ConversationEvaluator, group_seed
from viva.eval.direct import DirectEvaluator, DirectSampler
from viva.eval.judged import WinRateEvaluator
from viva.judging.answers import AnswerCheck
from viva.judging.judge import JudgeOptions
from viva.recipes import FailedRunError, RefusedRunError
from viva.recipes.common import REFUSED, EngineCheck, OpenRun, finish_run, open_run, say
from viva.recipes.config import RecipeConfig
from viva.recipes.evaluation.target import OpenPolicy
from viva.recipes.judges import judge_of, policy_of
from viva.recipes.plan import Plan
from viva.rewards.credit import TokenDecoder, token_texts
from viva.run.trackers import CONSOLE, OpenTracker
from viva.sdk import Ending, ServiceClient
from viva.selfplay.user_code import GraderError
from viva.training.batch import EstimatorStoppedError, ExpertConfig
from viva.training.data import (
    SPELLED_OUT,
    BuilderFactory,
    PromptsChangedError,
    spelled_out,
)
from viva.training.followers import Follower, JudgeStoppedError
from viva.training.loop import AllGroupsFailedError, Evaluator, LoopConfig, Training, train
from viva.training.reference import KlPenalty
from viva.training.remote import EngineError, explain
from viva.training.service import EngineConfig, end_session
from viva.training.update import EXACT_GAP, UpdateConfig

_LOOKED_AT = 64
"""Prompts whose words are looked up."""

_SIGNALLED = 128
"""Exit codes from here on are those of a signal."""

_MANY_PASSES = 20
"""A run of more of them than this is told to be long, where nobody asked for it."""


async def run_recipe(config: RecipeConfig) -> Signals | None:
    """Do a whole run.

    Returns:
        The signal that interrupted the run, whose state is saved; ``None`` after a complete run.

    Raises:
        RefusedRunError: If the run cannot begin; nothing was computed.
        FailedRunError: If it failed later.
    """
    code = 1  # what trackers are told of a run that raises
    async with AsyncExitStack() as cleanup:

        def close(tracker: OpenTracker) -> None:
            tracker.close(code)

        async def end(service: ServiceClient) -> None:
            ending: Ending = "success" if code == 0 else "errored" if code < _SIGNALLED else "interrupted"
            await end_session(service, ending)

        def keep(opened: OpenRun) -> None:
            cleanup.push_async_callback(end, opened.service)  # last, when nothing else is open any more
            cleanup.callback(lambda: opened.folder.close(refused=code == REFUSED))
            for tracker in opened.trackers:
                cleanup.callback(close, tracker)

        try:
            received = await _run_recipe(config, keep)
        except RefusedRunError:
            code = REFUSED
            raise
        code = 0 if received is None else _SIGNALLED + received
    return received


async def _run_recipe(config: RecipeConfig, keep: Callable[[OpenRun], None]) -> Signals | None:
    """`run_recipe` but for closing what is open: the run is handed to ``keep`` as soon as it is."""
    engine = EngineConfig()
    try:
        plan = config.make_plan()
        engine = plan.engine
        async with engine.watched():
            opened = await open_run(plan, _server_check(config) if engine.engine == "remote" else None)
            keep(opened)
            training = await config.build_training(plan, opened)
    # OSError: a model, file or folder that cannot be read; the others: a remote engine that refuses, or is gone
    except (ValueError, OSError, EngineError, tinker.TinkerError) as error:
        raise RefusedRunError(str(explain(error, engine.server) or _disk_problem(error) or error)) from error
    _introduce(plan, training)
    try:
        async with engine.watched():
            is_complete = await train(training)
        finish_run(training, model=plan.model, is_complete=is_complete)
    except (AllGroupsFailedError, JudgeStoppedError, EstimatorStoppedError, PromptsChangedError) as error:
        raise FailedRunError(str(error)) from error
    except GraderError as error:
        raise FailedRunError(
            f"{error}. A run goes on with the grader that it began with: if the fault is in its code, begin a new run; "
            f"if it is outside (a file, a server), mend that. {_how_to_go_on(opened)}"
        ) from error
    except FloatingPointError as error:  # nothing was saved since
        raise FailedRunError(f"{error} {_how_to_go_on(opened)}") from error
    except FailedRunError:
        raise
    # what the SDK raises, among others
    except (ValueError, RuntimeError, OSError, tinker.TinkerError) as error:
        told = explain(error, engine.server) or _disk_problem(error)
        if told is None:
            raise
        raise FailedRunError(f"{told} {_how_to_go_on(opened)}") from error
    return None if is_complete else training.interrupts.received


def _server_check(config: RecipeConfig) -> EngineCheck:
    """The doctor's examination of what the run will ask of a server."""
    from viva.doctor.examination import check_engine

    return partial(
        check_engine,
        loss_fn=config.loss_fn,
        loss_fn_config=config.loss_fn_config,
        temperature=config.temperature,
        scores_prompts=config.kl_penalty_coef > 0,
    )


async def make_training(
    plan: Plan,
    opened: OpenRun,
    make_builder: BuilderFactory | None,
    *,
    dataset: RLDataset,
    needs_answers: bool = False,
    experts: ExpertConfig | None = None,
    samples_every: int = 1,
    followers: Sequence[Follower] = (),
    evaluators: Sequence[Evaluator] = (),
) -> Training:
    """The loop's parts for an open run.

    ``make_builder`` makes the conversations that test prompts are played as, if there are any; prompts without a known
    answer are left out if the conversations' reward ``needs_answers``. ``followers`` give judges and others their
    weights at each step; ``evaluators`` come after direct answers and test conversations. For ``experts`` and
    ``samples_every`` see `viva.training.loop.LoopConfig`.

    Raises:
        ValueError: If the judge of test answers cannot be had.
    """
    judged, more_followers = await _win_rate_evaluators(plan, opened)
    penalty, reference_followers = await _penalty(plan, opened)
    return Training(
        config=_loop_config(plan, opened, experts, samples_every),
        client=opened.client,
        dataset=dataset,
        folder=opened.folder,
        resume_from=opened.resume_from,
        evaluators=[
            *direct_evaluators(plan, opened),
            *_conversation_evaluators(plan, opened, make_builder, needs_answers=needs_answers),
            *evaluators,
            *judged,
        ],
        followers=[*followers, *more_followers, *reference_followers],
        sinks=[*opened.trackers, StepTimeNotice(num_steps=len(dataset))],
        first_metrics=_prompt_metrics(plan, opened),
        show_steps=any(choice.name == CONSOLE for choice in plan.trackers),
        penalty=penalty,
        token_texts=partial(token_texts, cast(TokenDecoder, opened.renderer.tokenizer)),
    )


async def _penalty(plan: Plan, opened: OpenRun) -> tuple[KlPenalty | None, list[Follower]]:
    """The KL penalty, if there is one, and what gives its reference the weights of the run's beginning."""
    coef = plan.config.kl_penalty_coef
    if not coef:
        return None, []
    reference, followers = await policy_of(JudgeOptions(policy="initial"), plan, opened, "reference")
    return KlPenalty(coef=coef, reference=reference), followers


def direct_evaluators(plan: Plan, opened: OpenRun) -> list[DirectEvaluator]:
    """Evaluators of bare questions, where test prompts have answers."""
    graded = [item for item in plan.test if item.answer is not None]
    if not graded:
        return []
    direct = direct_sampler(plan.config, plan.check, opened)
    samples, greedy = plan.config.eval_samples, plan.config.eval_greedy
    return [DirectEvaluator(items=graded, direct=direct, num_samples=samples, asks_greedy=greedy)]


def direct_sampler(config: RecipeConfig, check: AnswerCheck, opened: OpenRun | OpenPolicy) -> DirectSampler:
    """Asks bare questions as a run does."""
    sampling = config.sampling(opened.context_window)
    return DirectSampler(
        renderer=opened.renderer,
        # a question that took too long would end the run
        sampling=replace(sampling, temperature=config.direct_temperature, timeout_s=None),
        system_prompt=config.system_prompt,
        check=check,
    )


def _conversation_evaluators(
    plan: Plan, opened: OpenRun, make_builder: BuilderFactory | None, *, needs_answers: bool
) -> list[Evaluator]:
    """Evaluators of whole conversations on the first test prompts; none without a builder of them."""
    config = plan.config
    can_be_paid = [item for item in plan.test if item.answer is not None or not needs_answers]
    spoken = can_be_paid[: config.num_test_conversations]
    if not spoken or make_builder is None:
        return []
    return [
        ConversationEvaluator(
            make_builders=lambda: [
                make_builder(item, group_seed(config.seed, index)) for index, item in enumerate(spoken)
            ],
            sampling=config.sampling(opened.context_window),
        )
    ]


async def _win_rate_evaluators(plan: Plan, opened: OpenRun) -> tuple[list[Evaluator], list[Follower]]:
    """The evaluator of ``eval_judge``, if there is one, and what gives it the weights of the run's beginning."""
    if plan.eval_judge is None:
        return [], []
    start, followers = await policy_of(JudgeOptions(policy="initial"), plan, opened, "start")
    if plan.eval_judge.model is None:
        judge = plan.eval_judge.make(start, opened.renderer)
    else:
        judge, _ = await judge_of(plan.eval_judge, plan, opened)  # nothing follows the run for it
    direct = direct_sampler(plan.config, plan.check, opened)
    return [WinRateEvaluator(items=plan.test, direct=direct, start=start, judge=judge)], followers


def _prompt_metrics(plan: Plan, opened: OpenRun) -> dict[str, float]:
    """Whether the model's tokenizer knows the words of the prompts."""
    items = plan.order.items
    questions = [items[index].question for index in range(min(len(items), _LOOKED_AT))]
    tokenizer: Any = opened.renderer.tokenizer
    share = spelled_out(lambda text: tokenizer.encode(text, add_special_tokens=False), questions)
    return {} if share is None else {SPELLED_OUT: share}


def _loop_config(plan: Plan, opened: OpenRun, experts: ExpertConfig | None, samples_every: int) -> LoopConfig:
    config = plan.config
    return LoopConfig(
        sampling=config.sampling(opened.context_window),
        experts=experts,
        samples_every=samples_every,
        tokens_every=config.tokens_every,
        eval_every=config.eval_every,
        save_every=config.save_every,
        max_staleness=config.max_staleness,
        stream_updates=config.stream_updates,
        update=UpdateConfig(
            learning_rate=plan.learning_rate,
            loss_fn=config.loss_fn,
            loss_fn_config=config.loss_fn_config,
            num_substeps=config.num_substeps,
            grad_clip_norm=config.grad_clip_norm,
            max_logprob_gap=_largest_gap(plan),
        ),
    )


def _largest_gap(plan: Plan) -> float | None:
    """Largest difference allowed between sampler and trainer of one precision and policy; of others ``None``."""
    engine, config = plan.engine, plan.config
    if engine.engine != "local" or engine.precision != "float32" or config.max_staleness:
        return None
    # what is divided by the temperature is rounded before
    return EXACT_GAP / min(config.temperature or 1.0, 1.0)


def _disk_problem(error: Exception) -> str | None:
    """Message about a file that cannot be written or read; ``None`` if the error is about something else."""
    if not isinstance(error, OSError) or error.filename is None:
        return None
    return f"{error.filename}: {error.strerror}. Make room there, or see to the disk."


def _how_to_go_on(opened: OpenRun) -> str:
    try:
        last = opened.folder.checkpoints.latest()
    except (ValueError, OSError) as error:
        return str(error)
    if last is None:
        return "Nothing was saved yet: begin again with the same command and behavior_if_exists=resume."
    return (
        f"The state after {counted(last.next_step, 'step')} is saved: go on with the same command and "
        "behavior_if_exists=resume."
    )


def _introduce(plan: Plan, training: Training) -> None:
    config, order = plan.config, plan.order
    say(
        f"{config.model_name}: {counted(len(order), 'step')} of "
        f"{counted(order.groups_per_batch, plan.unit.groups.removesuffix('s'))}, {plan.summary}; "
        f"{counted(len(order.items), 'prompt')} ({order.num_passes:.3g} pass{'' if order.num_passes == 1 else 'es'}), "
        f"{counted(len(plan.test), 'test prompt')}; "
        f"learning rate {training.config.update.learning_rate:.3g}; log_path={plan.log_path}; "
        f"engine: {plan.engine.server or 'this machine'}"
    )
    if config.max_steps is None and config.num_epochs is None and order.num_passes > _MANY_PASSES:
        say(
            f"note: nothing says how long to train, so it is max_training_datapoints={config.max_training_datapoints}: "
            f"{order.num_passes:,.0f} passes over {counted(len(order.items), 'prompt')} in {len(order):,} steps, "
            f"{len(order) / 60:,.0f} hours if a step takes a minute. num_epochs=... or max_steps=... makes it shorter"
        )


_WORTH_TELLING_S = 60.0


class StepTimeNotice:
    """Tells after the first measured step of a run how long the others will take."""

    def __init__(self, *, num_steps: int) -> None:
        self._num_steps = num_steps
        self._has_spoken = False

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at one step's metrics."""
        left = self._num_steps - step - 1
        if self._has_spoken or "time/rollouts" not in metrics or left < 1:
            return
        self._has_spoken = True
        seconds = metrics["time/step"] - metrics.get("time/evaluation", 0.0)
        hours = seconds * left / 3600
        told = f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 60:,.1f} minutes"
        if seconds * left >= _WORTH_TELLING_S:
            others = counted(left, "other step")
            say(
                f"step {step + 1} took {seconds:.1f} s without evaluation; at that rate {others} will take {told}"
            )
