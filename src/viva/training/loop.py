"""The training loop: snapshot, rollouts, advantages, update, log, checkpoint.

Every random number is a pure function of (seed, step, ...), so the loop's only state is the engine's weights and
optimiser and the number of the next step. A run that is killed and resumed does what it would have done.

Legend: ``_P`` groups of a batch, ``_G`` members of a group (seats), ``_D`` datums.
"""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from tinker_cookbook.rl.types import RLDataset

from viva.conversation.messages import counted
from viva.experts.strategy import is_strategy
from viva.judging.comparison import NoValidComparisonsError
from viva.judging.judge import SamplingClient
from viva.run.alarms import ALARMS, Level, StopRule, Watch, fired
from viva.run.checkpoints import Checkpoint
from viva.run.folder import RunFolder
from viva.run.interrupts import Interrupts
from viva.run.journal import JournalMode
from viva.sdk import TrainingClient, answers_together, settled
from viva.threads import frozen_gc
from viva.training.ahead import GroupStream, RolloutsAhead
from viva.training.batch import EstimatorStoppedError, ExpertConfig, make_batch, plain_batch
from viva.training.console import Begin, RunConsole
from viva.training.data import ExampleDataset, PromptsChangedError
from viva.training.followers import Follower, JudgeStoppedError, check_judge
from viva.training.members import Members, member_metrics, update_members
from viva.training.metrics import Clock, rollout_metrics
from viva.training.records import TokenTexts, chosen_groups, token_rows, transcript_row
from viva.training.reference import KlPenalty, penalised
from viva.training.rollouts import GroupOutcome, run_groups
from viva.training.sampling import Sampling, SeatSampler
from viva.training.update import UpdateConfig, imitate, update_policy

MetricSink: TypeAlias = Callable[[int, Mapping[str, float]], None]
"""Gets every step's metrics, besides the run's own files."""

Evaluator: TypeAlias = Callable[[SamplingClient, int, Begin], Awaitable[Mapping[str, float]]]
"""Measures a snapshot of the policy after so many steps: metrics, with names that start with ``test/``. It may report
its progress to what the last argument begins."""


class AllGroupsFailedError(RuntimeError):
    """Not one group of a batch could be played; going on would train on nothing. Has what was said in them."""

    def __init__(self, told: str, transcripts: Sequence[Mapping[str, object]] = ()) -> None:
        super().__init__(told)
        self.transcripts = transcripts


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """The loop's settings."""

    update: UpdateConfig
    sampling: Sampling = field(default_factory=Sampling)
    experts: ExpertConfig | None = None
    """Estimation of batches whose builders name search strategies (`viva.experts.strategy`)."""
    samples_every: int = 1
    """Keep the samples of such a batch every so many steps, for ``viva estimate``; 0 keeps none."""
    tokens_every: int = 10
    """Keep the tokens of one group of every strategy every so many steps, for ``viva view``; 0 keeps none."""
    eval_every: int = 5
    """Evaluate before the first step, every so many steps, and at the end; 0 never evaluates."""
    save_every: int = 20
    """Save a checkpoint every so many steps and at the end; 0 saves at the end only."""
    max_staleness: int = 0
    """Updates that the policy which samples may be behind the one that is trained, see `viva.training.ahead`."""
    stream_updates: bool = False
    """Whether groups are trained while others are still played, see `viva.training.ahead`."""

    def __post_init__(self) -> None:
        """Reject settings that contradict each other."""
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must be 0 or more; got {self.max_staleness}")
        if not self.stream_updates:
            return
        if self.max_staleness:
            raise ValueError(
                "stream_updates sends the next step's gradients before this step's optimiser ran if rollouts run "
                f"ahead (max_staleness={self.max_staleness}); use one of the two"
            )
        if self.update.num_substeps != 1:
            raise ValueError(
                f"num_substeps={self.update.num_substeps} divides the whole batch; with stream_updates it must be 1"
            )
        if self.update.loss_fn == "dro":
            raise ValueError("loss_fn=dro asks for logprobs before it trains; it takes no stream_updates")

    def starts_afresh(self, step: int) -> bool:
        """Whether a step begins with an evaluation or after a regular checkpoint."""
        return any(every and step % every == 0 for every in (self.eval_every, self.save_every))


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Everything one run works with."""

    config: LoopConfig
    client: TrainingClient
    """The policy that is trained; of several, the main one."""
    members: Members | None = None
    """All policies, where there are several."""
    dataset: RLDataset
    folder: RunFolder
    resume_from: Checkpoint | None = None
    evaluators: Sequence[Evaluator] = ()
    followers: Sequence[Follower] = ()
    """Give judges, and whoever else asks a model, their weights at each step."""
    sinks: Sequence[MetricSink] = ()
    show_steps: bool = True
    """Whether the console has a line for every step; warnings it has in any case."""
    first_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of the data, logged with the first step."""
    penalty: KlPenalty | None = None
    """Keeps the policy near to what it was at the start."""
    token_texts: TokenTexts | None = None
    """Gives every kept token its text; without it, only ids are kept."""
    stop_rule: StopRule | None = None
    """Ends the run early, with the checkpoint that stood best."""
    alarms: Mapping[str, Level] = field(default_factory=dict[str, Level])
    """Reference levels of alarms, by name; those that are left out are not watched."""
    interrupts: Interrupts = field(default_factory=Interrupts)


_Rows: TypeAlias = dict[str, list[dict[str, object]]]
"""Lines of a step for the run's files: ``transcripts``, ``samples`` and ``tokens``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlayedStep:
    """The rollouts of a step."""

    outcomes_P: Sequence[GroupOutcome]
    stream: GroupStream | None
    """Trains on them already."""
    staleness: int
    """Updates made after the policy that sampled."""
    seconds: float


async def train(run: Training) -> bool:
    """Train from the last checkpoint to the end of the data set, or until the stop rule ends the run.

    Returns:
        Whether the run is complete. ``False`` means that it was interrupted and can be resumed.

    Raises:
        AllGroupsFailedError: If every group of a batch failed; the state before that step is saved.
        JudgeStoppedError: If a judge gives no further answer; the state before that step is saved.
        EstimatorStoppedError: If an estimator refuses a batch; the state before that step is saved.
        PromptsChangedError: If a prompt was changed since the run began; the state before that step is saved.
        FloatingPointError: If a loss, gradient, logprob or metric is not a finite number, or sampler and trainer are
            farther apart than allowed. Nothing is saved.
    """
    next_step = first_step = run.resume_from.next_step if run.resume_from else 0
    run.folder.journal.drop_before(first_step)
    history = run.folder.log.metrics()
    console = RunConsole(
        num_steps=len(run.dataset), first_step=first_step, show_steps=run.show_steps, history=history
    )
    watch = Watch(run.alarms, history)
    ahead = RolloutsAhead(
        play=partial(_rollouts, run, console),
        first_step=first_step,
        num_steps=len(run.dataset),
        max_staleness=run.config.max_staleness,
        starts_afresh=run.config.starts_afresh,
    )
    with run.interrupts.listening(), console, frozen_gc():
        try:
            for step in range(first_step, len(run.dataset)):
                if why := crossed(run):
                    console.message(
                        f"stopped after {counted(next_step, 'step')}: {why}. The best checkpoint is kept."
                    )
                    await ahead.close()
                    await _finish(run, next_step, console)
                    return True
                await _step(run, step, ahead, console, watch)
                gc.collect()  # what the step left behind, see `frozen_gc`
                next_step = step + 1
                is_best = run.stop_rule is not None and run.stop_rule.is_best(run.folder.log.metrics())
                if is_best or (run.config.save_every and next_step % run.config.save_every == 0):
                    await _save(run, next_step, best=is_best)
                if run.interrupts.received:
                    break
            else:
                await _finish(run, next_step, console)
                return True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not run.interrupts.received or task is None:
                raise
            task.uncancel()
        except (AllGroupsFailedError, JudgeStoppedError, EstimatorStoppedError, PromptsChangedError) as error:
            await _save(run, next_step)
            if isinstance(error, AllGroupsFailedError):  # behind the checkpoint: a resumed run cuts it off
                run.folder.log.write_failed(error.transcripts)
            raise
        finally:
            with run.interrupts.protected():
                await _close(run, ahead)
        if run.interrupts.cut_short:  # the weights are no longer those after any step
            console.message(
                "interrupted in the middle of an update: what was sampled for it is in the journal"
            )
        else:
            console.message(f"interrupted: saving the state after {counted(next_step, 'step')}")
            await _save(run, next_step)
        return False


async def _close(run: Training, ahead: RolloutsAhead[_PlayedStep]) -> None:
    await ahead.close()
    for follower in run.followers:
        await follower.close()
    await run.folder.journal.close()


async def _step(
    run: Training, step: int, ahead: RolloutsAhead[_PlayedStep], console: RunConsole, watch: Watch
) -> None:
    if isinstance(run.dataset, ExampleDataset):
        return await _imitation_step(run, run.dataset, step, console)
    config, clock = run.config, Clock()
    sampler = await _snapshot(run, step)
    clock.lap("snapshot")
    metrics: dict[str, float] = dict(run.first_metrics) if step == 0 else {}
    if config.eval_every and step % config.eval_every == 0:
        metrics |= await _evaluate(run, sampler, step, console)
        clock.lap("evaluation")
    ahead.offer(step, sampler)
    played = await ahead.take(step)
    metrics = rollout_metrics(played.outcomes_P) | metrics
    if run.members is not None:
        metrics |= member_metrics(played.outcomes_P)
    metrics |= {"rollout/staleness": played.staleness} | _told_by_followers(run, step)
    clock.lap("rollouts")
    console.phase("updating")
    with run.interrupts.protected():
        updated, rows = await _update(run, step, played, console)
        for follower in run.followers:
            await follower.trained()
        metrics |= updated
        metrics |= watch.see(metrics)
        clock.lap("update")
        metrics |= clock.all(metrics["rollout/sampled_tokens"], played.seconds)
        _log(run, step, metrics, rows)
        console.step_done(step, metrics)
        for name in fired(metrics):
            console.warn_once(f"alarm {name}", f"step {step + 1}: alarm {name}: {ALARMS[name].text}")


async def _imitation_step(run: Training, dataset: ExampleDataset, step: int, console: RunConsole) -> None:
    clock, metrics = Clock(), dict(run.first_metrics) if step == 0 else {}
    if run.config.eval_every and step % run.config.eval_every == 0:
        console.phase("evaluating")
        metrics |= await _evaluate(run, await _snapshot(run, step), step, console)
        clock.lap("evaluation")
    console.phase("updating")
    with run.interrupts.protected():
        data_D = [example.datum() for example in dataset.order.batch(step)]
        metrics |= await imitate(run.client, data_D, run.config.update)
        clock.lap("update")
        metrics |= clock.all(0, 0)
        _log(run, step, metrics)
        console.step_done(step, metrics)


async def _update(
    run: Training, step: int, played: _PlayedStep, console: RunConsole
) -> tuple[dict[str, float], _Rows]:
    """Train on a batch; metrics, and what is kept of it."""
    config, outcomes_P = run.config, played.outcomes_P
    keeps_tokens = bool(config.tokens_every) and step % config.tokens_every == 0
    chosen = chosen_groups(outcomes_P, seed=config.sampling.seed, step=step) if keeps_tokens else []
    temperature = config.sampling.temperature
    # what the policy at the start samples differs from the reference by rounding alone, which Adam would enlarge
    penalty = run.penalty if step > played.staleness else None
    if run.members is None:
        batch = await make_batch(
            run.client,
            outcomes_P,
            config.experts,
            temperature=temperature,
            trained_at=config.update.temperature,
            keeps_silent=penalty is not None,
        )
    else:
        batch = plain_batch(outcomes_P, keeps_silent=penalty is not None)
    if penalty is not None:
        batch = await penalised(batch, penalty)
    for text in batch.warnings:
        console.warn_once(text.partition(":")[0], f"step {step + 1}: {text} (said once; see the metrics)")
    if run.members is None:
        result = await update_policy(
            run.client,
            batch.data_D,
            config.update,
            foreign_D=batch.foreign_D,
            check=batch.check,
            sent=None if played.stream is None else played.stream.sent,
        )
    else:
        result = await update_members(run.members, batch, config.update, temperature=temperature)
    keeps_samples = bool(config.samples_every) and step % config.samples_every == 0
    tokens = token_rows(outcomes_P, chosen, batch, result.logprobs_D, run.token_texts)
    return batch.metrics | result.metrics, {
        "transcripts": [transcript_row(step, index, outcome) for index, outcome in enumerate(outcomes_P)],
        "samples": [{"step": step, **record} for record in batch.records if keeps_samples],
        "tokens": [{"step": step, **row} for row in tokens],
    }


async def _snapshot(run: Training, step: int) -> SamplingClient:
    """The policy after so many steps, which judges are told of."""
    for follower in run.followers:
        await follower.reach(step)
    if run.members is not None:
        return await run.members.snapshot(run.folder.journal, step)
    return run.folder.journal.client(await settled(run.client.save_weights_and_get_sampling_client()), step)


def _journaled(
    run: Training,
    sampler: SamplingClient,
    console: RunConsole,
    step: int,
    *,
    is_last: bool = True,
    suffix: str = "",
) -> AbstractAsyncContextManager[None]:
    """A part of a step whose answers the journal keeps, see `viva.run.journal`."""
    mode: JournalMode = "turns"
    if answers_together(sampler):
        mode = "off" if run.config.max_staleness or run.config.stream_updates else "steps"
    return run.folder.journal.part(
        f"{step:06d}{suffix}",
        mode,
        is_last=is_last,
        report=lambda text: console.message(f"step {step + 1}: {text}"),
    )


def _told_by_followers(run: Training, step: int) -> dict[str, float]:
    return {name: value for each in run.followers for name, value in each.metrics(step).items()}


async def _evaluate(
    run: Training, sampler: SamplingClient, step: int, console: RunConsole, *, at_end: bool = False
) -> dict[str, float]:
    console.phase("evaluating")
    metrics: dict[str, float] = {}
    is_last = at_end or isinstance(run.dataset, ExampleDataset)  # else the step's rollouts follow
    suffix = "-end" if at_end else ""
    async with _journaled(run, sampler, console, step, is_last=is_last, suffix=suffix):
        for follower in run.followers:
            follower.follow(sampler, step)
        for each in run.evaluators:
            metrics |= await each(sampler, step, console.evaluating)
        console.evaluated()
    return metrics


async def _rollouts(
    run: Training, console: RunConsole, step: int, version: int, sampler: SamplingClient
) -> _PlayedStep:
    config, started = run.config, time.monotonic()
    for follower in run.followers:
        follower.follow(sampler, version)
    builders_P = run.dataset.get_batch(step)
    if (config.max_staleness or config.stream_updates) and any(map(is_strategy, builders_P)):
        raise ValueError(
            "the estimators of search strategies weigh a whole batch that the policy being trained has sampled; they "
            "take neither max_staleness nor stream_updates"
        )
    progress = console.sampling(len(builders_P))
    policy = SeatSampler(
        sampler=sampler,
        sampling=config.sampling.seeded("rollouts", step),
        on_reply=progress.on_reply,
    )
    stream = GroupStream(run.client, config.update) if config.stream_updates else None

    def on_group(index: int, outcome: GroupOutcome) -> None:
        check_judge(outcome, step)
        progress.on_group(outcome)
        if stream is not None:
            stream.add(index, outcome)

    async with _journaled(run, sampler, console, step):
        outcomes_P = await run_groups(
            builders_P, policy, max_retries=config.sampling.max_retries, on_group=on_group
        )
        _report_void(run, step, outcomes_P, console)
    seconds = time.monotonic() - started
    return _PlayedStep(outcomes_P=outcomes_P, stream=stream, staleness=step - version, seconds=seconds)


def _report_void(run: Training, step: int, outcomes_P: Sequence[GroupOutcome], console: RunConsole) -> None:
    """Tell about void groups; refuse to go on if nothing could be played, unless it was for unreadable verdicts."""
    void = [(each.void_failure.error_type, str(each.void_reason)) for each in outcomes_P if each.void_failure]
    kinds = Counter(kind for kind, _ in void)
    reasons = dict(reversed(void))
    in_order = dict.fromkeys(reasons[kind] for kind, _ in void)
    for kind, count in sorted(kinds.items()):
        console.warn_once(
            kind,
            f"step {step + 1}: {count} of {len(outcomes_P)} groups void, which train nothing: {reasons[kind]} "
            f"(said once; rollout/void counts them; 'viva view {run.folder.path}' shows them, state void). Where it "
            "does not last, a higher max_retries plays them again; else fix the cause and resume.",
        )
    if len(void) == len(outcomes_P) and NoValidComparisonsError.__name__ not in kinds:
        if FloatingPointError.__name__ in kinds:  # the state before that step may be what is broken
            raise FloatingPointError(f"nothing could be played in step {step + 1}: {min(reasons.values())}")
        raise AllGroupsFailedError(
            f"all {len(void)} groups of step {step + 1} failed: {'; '.join([*in_order][:3])}. The state before that "
            "step is saved; fix the cause and resume. A run goes on with the code that it began with: if the fault is "
            "in a grader, reward or strategy of your own, begin a new run.",
            [transcript_row(step, *each) for each in enumerate(outcomes_P)],
        )


def _log(run: Training, step: int, metrics: Mapping[str, float], rows: _Rows | None = None) -> None:
    run.folder.log.write_step(step, metrics, **(rows or {}))
    for sink in run.sinks:
        sink(step, metrics)


async def _save(
    run: Training, next_step: int, *, best: bool = False, final_sizes: Mapping[str, int] | None = None
) -> None:
    """Save a checkpoint; the final one knows how long the log's files were before the last evaluation."""
    members = [] if run.members is None else [run.members]
    with run.interrupts.protected():
        needed = (each.beside(next_step) for each in (*run.followers, *members))
        await run.folder.checkpoints.save(
            run.client,
            next_step=next_step,
            log_sizes=run.folder.log.sizes() if final_sizes is None else final_sizes,
            best=best,
            final=final_sizes is not None,
            beside={name: path for paths in needed for name, path in paths.items()},
            members={} if run.members is None else run.members.others,
        )
        run.folder.journal.drop_before(next_step if final_sizes is None else None)


def crossed(run: Training) -> str | None:
    """The reason of the stop rule to end the run after the steps logged so far; ``None`` without reason or rule."""
    return None if run.stop_rule is None else run.stop_rule.crossed(run.folder.log.metrics())


async def _finish(run: Training, next_step: int, console: RunConsole) -> None:
    """The last evaluation, logged as one more step, and the final checkpoint.

    Its log ends before that evaluation: a run that is made longer goes on as if it had never stopped.
    """
    start = run.resume_from
    if start is not None and start.final and start.next_step == next_step == len(run.dataset):
        run.folder.journal.drop_before(None)
        return
    sizes = run.folder.log.sizes()
    if run.config.eval_every and run.evaluators:
        clock = Clock()
        console.phase("evaluating")
        sampler = await _snapshot(run, next_step)
        metrics = await _evaluate(run, sampler, next_step, console, at_end=True)
        metrics |= _told_by_followers(run, next_step)
        clock.lap("evaluation")
        _log(run, next_step, metrics | clock.all(0, 0))
        console.measured(metrics)
    console.ended()
    await _save(run, next_step, final_sizes=sizes)
