"""What each estimator does to the gradient, exactly and in batches of 64; writes the tables of docs/estimators.md.

    python benchmarks/estimators.py [seeds=8] [batches=16] [page=docs/estimators.md]

Every arm is computed by `viva.experts` itself on a policy whose completions can be enumerated (_tabular.py). For each
arm and context gap: the expected cosine between a batch's gradient and the true one (simulated batches), their spread
around their mean relative to its length, and from exact expectations at the population's baseline the cosine, the
length relative to the true gradient, and the share of the squared length on style tokens (which no reward looks at, so
that the true share is 0).
"""

import functools
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _tabular import Problem, coefficients_T, make_problem

from viva.experts.estimation import Baseline, Estimator, choose_baseline, estimate
from viva.experts.estimators import make_estimator
from viva.experts.samples import Sample

BATCH = 64
GAPS = (0.25, 1.0, 2.0, 4.0)
PPO_LOW, PPO_HIGH = 0.8, 1.2


@dataclass(frozen=True, kw_only=True)
class Arm:
    """An estimator with its baseline, and which strategies fill the batch in equal parts."""

    label: str
    estimator: Estimator
    strategies: tuple[str, ...]
    baseline: Baseline | None = None
    ppo_clip: bool = False


def arms(strategies: tuple[str, ...]) -> list[Arm]:
    def arm(name: str, baseline: Baseline | None = None, *, label: str = "", **options: object) -> Arm:
        estimator = make_estimator(name, **options)
        chosen = choose_baseline(estimator, baseline)
        suffix = "" if chosen is Baseline.NONE else f", {chosen}"
        return Arm(
            label=label or f"`{name}`{suffix}", estimator=estimator, strategies=strategies, baseline=chosen
        )

    both = len(strategies) > 1
    rows = [
        arm("importance_sampling", Baseline.STRATUM),
        arm("importance_sampling", Baseline.PROMPT_UNION),
        arm("token_tis", Baseline.STRATUM),
        arm("token_tis", Baseline.PROMPT_UNION),
        arm("token_tis", Baseline.WEIGHTED),
        arm("shaped", Baseline.STRATUM),
        arm("shaped", Baseline.PROMPT_UNION),
        arm("shaped", Baseline.WEIGHTED),
        arm("none", Baseline.STRATUM),
        arm("none", Baseline.PROMPT_UNION),
        arm("positives"),
        arm("seq_tis"),
        arm("seq_is", Baseline.WEIGHTED, force=True),
    ]
    if both:
        rows += [
            arm("balance", Baseline.PROMPT_UNION),
            arm("balance", Baseline.WEIGHTED),
            arm("distill", label="`distill` (token)", teacher="hint"),
            arm("distill", label="`distill` (return)", teacher="hint", horizon="return"),
        ]
    else:  # without a second stratum a union is the stratum
        rows = [row for row in rows if row.baseline is not Baseline.PROMPT_UNION]
    ppo = arm("importance_sampling", Baseline.STRATUM)
    return [*rows, Arm(**{**vars(ppo), "label": "PPO clip on the whole ratio, stratum", "ppo_clip": True})]


def ppo_clip(factors: np.ndarray, ratios: np.ndarray) -> np.ndarray:
    """What PPO's clipped loss leaves of ``ratio * advantage``: 0 where the ratio is beyond the clip on its side."""
    dropped = ((factors > 0) & (ratios > PPO_HIGH)) | ((factors < 0) & (ratios < PPO_LOW))
    return np.where(dropped, 0.0, factors)


def factors_of(arm: Arm, samples: Sequence[Sample]) -> np.ndarray:
    """Factor of every token's score, [N, T], from the library."""
    estimates = estimate(samples, arm.estimator, baseline=arm.baseline)
    factors = np.stack(
        [coefficients_T(sample, each) for sample, each in zip(samples, estimates, strict=True)]
    )
    if not arm.ppo_clip:
        return factors
    return ppo_clip(factors, np.exp(np.stack([s.old_logprobs_T - s.sampling_logprobs_T for s in samples])))


@functools.lru_cache(maxsize=64)
def weights_of_all(problem: Problem, estimator: Estimator, strategies: tuple[str, ...]) -> np.ndarray:
    """Weights of every completion under every strategy, [strategies * Y, T]."""
    samples = [sample for strategy in strategies for sample in problem.samples[strategy]]
    return np.stack([each.weights_T for each in estimator.weights(samples)])


def expected_factors(arm: Arm, problem: Problem) -> dict[str, np.ndarray]:
    """Factor of every token of every completion, [Y, T] per strategy, at the population's baseline."""
    samples = [sample for strategy in arm.strategies for sample in problem.samples[strategy]]
    num_sequences = len(problem.rewards_Y)
    weights = weights_of_all(problem, arm.estimator, arm.strategies)
    drawn = np.concatenate([problem.drawn_from(strategy) for strategy in arm.strategies])
    rewards = np.tile(problem.rewards_Y, len(arm.strategies))
    own = arm.estimator.own_advantages(samples)
    if own is not None:
        advantages = np.stack(own)
    else:
        baseline = np.empty_like(rewards)
        for place in range(len(arm.strategies)):
            part = slice(place * num_sequences, (place + 1) * num_sequences)
            own_stratum = part if arm.baseline is Baseline.STRATUM else slice(None)
            mass = drawn[own_stratum] * (
                weights[own_stratum].mean(axis=1) if arm.baseline is Baseline.WEIGHTED else 1.0
            )
            baseline[part] = mass @ rewards[own_stratum] / mass.sum()
        advantages = np.repeat((rewards - baseline)[:, None], weights.shape[1], axis=1)
    ratios = np.exp(np.stack([s.old_logprobs_T - s.sampling_logprobs_T for s in samples]))
    factors = weights * advantages * (ratios if arm.estimator.anchors_at_sampling else 1.0)
    if arm.ppo_clip:
        factors = ppo_clip(factors, ratios)
    return {
        strategy: factors[place * num_sequences : (place + 1) * num_sequences]
        for place, strategy in enumerate(arm.strategies)
    }


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    norm = np.linalg.norm(first) * np.linalg.norm(second)
    return float((first * second).sum() / norm) if norm > 0 else 0.0


def measure(arm: Arm, problem: Problem, seed: int, batches: int) -> dict[str, float]:
    """The figures of one arm on one problem."""
    scores_Y_T_D, truth = problem.policy.scores_Y_T_D, problem.true_gradient
    pools = problem.samples
    mean = sum(
        np.einsum("yt,ytd->td", problem.drawn_from(strategy)[:, None] * factors_Y_T, scores_Y_T_D)
        for strategy, factors_Y_T in expected_factors(arm, problem).items()
    ) / len(arm.strategies)
    rng = np.random.default_rng(seed)
    share = BATCH // len(arm.strategies)
    gradients = []
    for _ in range(batches):
        drawn = [
            rng.choice(len(problem.rewards_Y), size=share, p=problem.drawn_from(s)) for s in arm.strategies
        ]
        samples = [
            pools[s][index] for s, indices in zip(arm.strategies, drawn, strict=True) for index in indices
        ]
        factors = factors_of(arm, samples)
        gradients.append(np.einsum("nt,ntd->td", factors, scores_Y_T_D[np.concatenate(drawn)]) / BATCH)
    spread = np.square(np.array(gradients) - np.mean(gradients, axis=0)).sum() / max(batches - 1, 1)
    squared = np.square(mean).sum()
    return {
        "batch cosine": float(np.mean([cosine(gradient, truth) for gradient in gradients])),
        "noise": float(np.sqrt(spread / squared)) if squared > 0 else 0.0,
        "mean cosine": cosine(mean, truth),
        "length": float(np.linalg.norm(mean) / np.linalg.norm(truth)),
        "artefact": float(np.square(mean[problem.num_content :]).sum() / squared) if squared > 0 else 0.0,
    }


Measured = dict[str, dict[float, list[dict[str, float]]]]
"""Figures by row of a table, gap and seed."""


def table(measured: Measured, figures: Sequence[str]) -> str:
    """Means over seeds of the figures that share a cell."""
    lines = ["| | " + " | ".join(f"{gap} nats" for gap in GAPS) + " |", "|---" * (len(GAPS) + 1) + "|"]
    for label, seeds_of in measured.items():
        cells = [
            " / ".join(f"{np.mean([seed[figure] for seed in seeds_of[gap]]):.2f}" for figure in figures)
            for gap in GAPS
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(page: Path, name: str, text: str) -> None:
    """Replace the text between the markers of a table."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    old = page.read_text(encoding="utf-8")
    if begin not in old or end not in old:
        raise ValueError(f"{page} has no markers {begin} and {end}")
    new = re.sub(
        re.escape(begin) + ".*?" + re.escape(end), lambda _: f"{begin}\n{text}\n{end}", old, flags=re.S
    )
    page.write_text(new, encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Design:
    """One setting, and its tables on the page: the figures that share a cell."""

    name: str
    strategies: tuple[str, ...]
    style: bool
    num_right: int
    tables: tuple[tuple[str, ...], ...]


DESIGNS = (
    Design(
        name="hard mixture",
        strategies=("iid", "hint"),
        style=True,
        num_right=4,
        tables=(("batch cosine",), ("noise",), ("mean cosine", "length", "artefact")),
    ),
    Design(
        name="medium mixture",
        strategies=("iid", "hint"),
        style=True,
        num_right=3,
        tables=(("batch cosine",), ("artefact",)),
    ),
    Design(
        name="hard mixture without style",
        strategies=("iid", "hint"),
        style=False,
        num_right=4,
        tables=(("batch cosine",),),
    ),
    Design(
        name="hard, hinted only",
        strategies=("hint",),
        style=True,
        num_right=4,
        tables=(("batch cosine", "mean cosine", "artefact"),),
    ),
)


def run_design(design: Design, *, seeds: int, batches: int) -> dict[str, str]:
    """The text of every table of a design, by name."""
    iid = Arm(
        label="iid only", estimator=make_estimator("none"), strategies=("iid",), baseline=Baseline.STRATUM
    )
    measured: Measured = {}
    for seed in range(seeds):
        for gap in GAPS:
            problem = make_problem(seed, gap=gap, style=design.style, num_right=design.num_right)
            for arm in [iid, *arms(design.strategies)]:
                found = measure(arm, problem, seed, batches)
                measured.setdefault(arm.label, {}).setdefault(gap, []).append(found)
    return {f"{design.name}, {' / '.join(figures)}": table(measured, figures) for figures in design.tables}


def regime(*, seeds: int) -> str:
    """What a gap does to the ratios of hinted samples and to PPO's clip on them, exactly (hard problem)."""
    measured: Measured = {}
    for seed in range(seeds):
        for gap in GAPS:
            problem = make_problem(seed, gap=gap, style=True, num_right=4)
            for name, value in regime_figures(problem).items():
                measured.setdefault(name, {}).setdefault(gap, []).append({"value": value})
    return table(measured, ["value"])


def regime_figures(problem: Problem) -> dict[str, float]:
    policy, hinted = problem.policy.probabilities_Y, problem.hinted.probabilities_Y
    ratios = np.exp(problem.policy.logprobs_Y_T - problem.hinted.logprobs_Y_T)
    factors = ratios * (problem.rewards_Y - hinted @ problem.rewards_Y)[:, None]
    kept = ppo_clip(factors, ratios) != 0

    def kept_share(is_right: np.ndarray) -> float:
        return (hinted @ (kept & is_right).sum(axis=1)) / (hinted @ is_right.sum(axis=1))

    return {
        "success of the policy": policy @ problem.rewards_Y,
        "success under the hint": hinted @ problem.rewards_Y,
        "effective sample size of `seq_is`": 1 / (policy**2 / hinted).sum(),
        "mean `balance` weight (half of the batch hinted)": hinted @ (2 * policy / (policy + hinted)),
        "tokens of right samples that PPO's clip keeps": kept_share(factors > 0),
        "tokens of wrong samples that PPO's clip keeps": kept_share(factors < 0),
    }


def main(options: dict[str, str]) -> None:
    seeds, batches = int(options.get("seeds", 8)), int(options.get("batches", 16))
    page = Path(options.get("page", Path(__file__).parents[1] / "docs" / "estimators.md"))
    started = time.process_time()
    texts = {"regime": regime(seeds=seeds)}
    for design in DESIGNS:
        texts |= run_design(design, seeds=seeds, batches=batches)
    for name, text in texts.items():
        print(f"\n{name}\n{text}")
        write(page, name, text)
    print(f"\n{time.process_time() - started:.0f} s of one core")


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
