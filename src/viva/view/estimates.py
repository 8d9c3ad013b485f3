"""Every estimator of `viva.experts` on the stored samples of a run, without sampling or scoring anything again.

Batches that a run kept (``samples_every``) are estimated by each, with the run's own baseline and mixture where they go
with it, and the figures of all batches are set side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import chz

from viva.conversation.messages import counted, text_table
from viva.experts.diagnostics import (
    Diagnostics,
    Recommendation,
    check_diagnostics,
    diagnose,
    mixes_units,
    recommend,
)
from viva.experts.estimation import Baseline, Estimator, choose_baseline, estimate
from viva.experts.estimators import ESTIMATORS, Distill, SequenceIS, make_estimator
from viva.experts.samples import Sample, stored_sample
from viva.run.files import SAMPLES_FILE, iter_rows
from viva.view.files import Row, read_config
from viva.view.log_check import check_log
from viva.view.run_index import Z95

_PLACE = ("step", "group", "seat")
"""Origin of a sample."""


@chz.chz
class EstimateOptions:
    """Options of ``viva estimate``."""

    last: int | None = chz.field(default=None, doc="use only so many stored batches, the last ones")
    estimators: list[str] | None = chz.field(default=None, doc='only these, like ["shaped", "balance"]')
    minimum: float = chz.field(
        default=0.1, doc="lowest effective sample size and mean weight without a remark"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorFigures:
    """One estimator's figures of the samples."""

    name: str
    baseline: Baseline
    is_unbiased: bool
    diagnostics: Diagnostics
    remarks: tuple[str, ...]
    """Strategies whose samples it wastes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimation:
    """All estimators' figures of a run's samples."""

    steps: tuple[int, ...]
    """Steps of the batches."""
    num_samples: int
    used: str | None
    """The estimator that the run used."""
    estimators: tuple[EstimatorFigures, ...]
    refused: dict[str, str]
    """Reasons, by estimator that could not be computed."""
    recommendation: Recommendation
    is_torn: bool = False
    """Whether the last stored sample was cut while it was written, and is left out."""


def estimate_run(run_dir: str | Path, options: EstimateOptions) -> Estimation:
    """Estimate a run's stored batches by every estimator.

    Raises:
        ValueError: If the run kept no samples, a stored sample is damaged, or an option makes no sense.
    """
    names = _chosen(options)
    torn: list[str] = []
    batches = _batches(Path(run_dir), options, torn)
    config = read_config(Path(run_dir))
    samples_N = [sample for batch in batches.values() for sample in batch]
    mixed = mixes_units(config.get("strategies", ()), config.get("conversation_reward", "verifier"))
    recommendation = recommend(samples_N, mixed_units=mixed)
    figures: list[EstimatorFigures] = []
    refused: dict[str, str] = {}
    for name in names:
        try:
            estimator = _estimator(name, config, samples_N)
            own = config.get("baseline")  # the run's baseline and mixture, where they go with the estimator
            baseline = choose_baseline(
                estimator, own if own in [str(each) for each in estimator.baselines] else None
            )
            mixture = None if estimator.combines_strategies else config.get("weights")
            estimates_N = [
                each
                for batch in batches.values()
                for each in estimate(batch, estimator, baseline=baseline, mixture=mixture)
            ]
        except ValueError as error:
            refused[name] = str(error)
            continue
        diagnostics = diagnose(samples_N, estimates_N)
        remarks = check_diagnostics(
            diagnostics, estimator=name, recommendation=recommendation, minimum=options.minimum
        )
        figures.append(
            EstimatorFigures(
                name=name,
                baseline=baseline,
                is_unbiased=estimator.is_unbiased,
                diagnostics=diagnostics,
                remarks=tuple(remarks),
            )
        )
    return Estimation(
        steps=tuple(batches),
        num_samples=len(samples_N),
        used=config.get("estimator"),
        estimators=tuple(figures),
        refused=refused,
        recommendation=recommendation,
        is_torn=bool(torn),
    )


def _chosen(options: EstimateOptions) -> list[str]:
    names = list(ESTIMATORS) if options.estimators is None else options.estimators
    for name in names:
        if name not in ESTIMATORS:
            raise ValueError(f"there is no estimator {name!r}; choose from {', '.join(ESTIMATORS)}")
    if options.last is not None and options.last < 1:
        raise ValueError(f"last must be 1 or more, or left out for all batches; got {options.last}")
    if not 0 <= options.minimum <= 1:
        raise ValueError(f"minimum must be a share between 0 and 1; got {options.minimum}")
    return names


def _batches(run_dir: Path, options: EstimateOptions, torn: list[str]) -> dict[int, list[Sample]]:
    """Samples by step. Prompts of different steps are different ones."""
    path = run_dir / SAMPLES_FILE
    check_log(run_dir, SAMPLES_FILE)
    batches: dict[int, list[Sample]] = {}
    for where, row in iter_rows(path, torn) if path.is_file() else ():
        step = row.get("step")
        if not isinstance(step, int):
            raise ValueError(f"{where}: a stored sample needs its step; got {step!r}")
        own = {key: value for key, value in row.items() if key not in _PLACE}
        try:
            sample = stored_sample({**own, "prompt": f"{step} {row.get('prompt')}"})
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        batches.setdefault(step, []).append(sample)
    if not batches:
        raise ValueError(
            f"{str(run_dir)!r} has no stored samples ({SAMPLES_FILE}). Give the folder of a run of math_efficiency; "
            "samples_every sets how often it keeps them, 0 never."
        )
    kept = sorted(batches)[-options.last :] if options.last else sorted(batches)
    return {step: batches[step] for step in kept}


def _estimator(name: str, config: Row, samples_N: Sequence[Sample]) -> Estimator:
    """With the run's options if it is the run's; nothing is trained here, so ``seq_is`` may show what it refuses."""
    if name == config.get("estimator") and config.get("estimator_options"):
        return make_estimator(name, **config["estimator_options"])
    if name == SequenceIS.name:
        return SequenceIS(force=True)
    if name == Distill.name:
        return Distill(teacher=_teacher(samples_N))
    return make_estimator(name)


def _teacher(samples_N: Sequence[Sample]) -> str:
    """A context behind which all on-policy samples were scored."""
    scored = [set(sample.context_logprobs) for sample in samples_N if sample.on_policy]
    common = sorted(set[str].intersection(*scored)) if scored else []
    if not common:
        raise ValueError("distill needs on-policy samples that were all scored under one other context")
    return common[0]


def estimation_text(result: Estimation) -> str:
    """All figures as tables for the terminal, and the recommendation."""
    used = f"the run used {result.used}" if result.used else "what the run used is not recorded"
    steps = ", ".join(str(step) for step in result.steps[:8]) + (", ..." if len(result.steps) > 8 else "")
    lines = [f"The last line of {SAMPLES_FILE} is torn, and left out."] if result.is_torn else []
    lines += [
        f"{counted(result.num_samples, 'sample')} of {len(result.steps)} batches (steps {steps}); {used}",
        "",
        *_sample_lines(result),
        "",
        *_estimator_lines(result),
        "",
    ]
    lines += [f"{name} cannot be computed: {why}" for name, why in result.refused.items()]
    lines += [f"note: {remark}" for each in result.estimators for remark in each.remarks]
    chosen = result.recommendation
    lines.append(f"recommended: estimator={chosen.estimator} baseline={chosen.baseline}: {chosen.reason}")
    return "\n".join(lines) + "\n"


def _sample_lines(result: Estimation) -> list[str]:
    """Lines that do not depend on the estimator."""
    if not result.estimators:
        return []
    rows = [("strategy", "samples", "reward", "finished", "gap/token", "gap in all", "self-check")]
    for strategy, figures in result.estimators[0].diagnostics.items():
        reward = _number(figures.reward_mean) + _half_width(figures.reward_mean_stderr, ".3f")
        finished, gap = _number(figures.finish_rate), _number(figures.token_gap_mean, "+.4f")
        total = _number(figures.total_gap_mean, "+.2f") + _half_width(figures.total_gap_mean_stderr, ".2f")
        check = _number(figures.self_check, ".1e")
        rows.append((strategy, str(figures.num_samples), reward, finished, gap, total, check))
    return [*text_table(rows, is_text=True), "±: 95 % interval over problems, whose samples are alike"]


def _half_width(stderr: float | None, form: str) -> str:
    """Half width of the normal 95 % interval."""
    return "" if stderr is None else f" ± {format(Z95 * stderr, form)}"


def _estimator_lines(result: Estimation) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("estimator", "baseline", "strategy", "weight", "ESS", "heaviest", "clipped", "silent")
    ]
    for each in result.estimators:
        name = each.name + (" (unbiased)" if each.is_unbiased else "")
        for strategy, figures in each.diagnostics.items():
            weights = (
                figures.weight_mean,
                figures.effective_sample_size,
                figures.largest_weight_share,
                figures.clipped_share,
                figures.zero_advantage_share,
            )
            rows.append((name, str(each.baseline), strategy, *map(_number, weights)))
            name = ""
    return [*text_table(rows, is_text=True), *_LEGEND] if len(rows) > 1 else []


_LEGEND = (
    "weight: mean effective weight per token; ESS: effective sample size, of 1; heaviest: share of one sample in all",
    "weight; clipped: share of tokens; silent: share of samples without any advantage",
)


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)
