"""Tables of the bench: accuracy of every arm, and the contrasts, from its ledger.

Intervals of an arm and of a contrast are Student's t over seeds; a contrast is paired by seed. Beside them a bootstrap
draws problems and seeds with replacement, together, so that it is clustered by both. P-values are those of the paired t
test, with Holm's correction over the contrasts of a bed (Holm, 1979).
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from _intervals import mean_interval
from scipy import stats

from viva.eval.estimates import draw_counts

FIGURES = {"greedy": "temperature 0", "sampled": "temperature 1", "majority": "majority of 8"}
Cell = Mapping[str, object]
_TURNS = (
    "from the first thirtieth of the steps to the best, by seed",
    "half of the best is lost at step",
)
_FOLLOWED = {
    "judge or verdict is right, tenths 1, 2, 5, 10 of the run": ("judge/accuracy", "judge/verdict/accuracy"),
    "samples or first solutions right (T = 1), the same tenths": ("correct", "correct/first"),
}
"""Figures of a run of ten budgets, and the metrics that have them: of plain samples, and of a conversation."""
_AT_THE_END = {
    "temperature 0 at the end": "greedy",
    "temperature 1": "sampled",
    "majority of 8": "majority",
}
"""Columns of test problems after such a run, and their figures."""
RESULTS = {
    "untrained": "untrained",
    "answers": "true answers: the ceiling",
    "hint": "true answers, half of the samples behind a hint that is swapped away",
    "feedback": "true answers, second attempts swapped into the bare question",
    "majority": "majority vote (TTRL)",
    "log_probability": "own log-probability",
    "peer_prediction": "peer prediction",
    "rubric_answers_first": "P(True): the policy reads each sample by itself, behind an answer of its own",
    "judged": "plain samples, judged in pairs by the policy",
    "judged_rare": "the same, a tie earns nothing: rare answers are paid",
    "serl": "SERL: the same, a win over a solution of other length counts nothing",
    "preference": "conversation preference RL",
    "r_sol": "critique self-play, r_sol alone",
    "r_sol_floor_0.1": "r_sol alone, behind the floor of today's default",
    "no_exchange": "r_sol alone, nobody reads critiques",
    "foreign_critiques": "r_sol alone, critiques of another problem are read",
    "critique": "critique self-play, three streams",
    "apart": "critique self-play, three streams, solver and critic trained apart",
    "comas": "CoMAS: critique self-play, solver against critic",
    "swap": "critique self-play's final solutions, swapped into the bare question",
    "shuffled": "true answers, shuffled: the floor",
}
"""Rows of the table of all beds, by arm."""
FRONT_ARMS = (
    *("untrained", "answers", "majority", "log_probability", "judged", "judged_rare"),
    *("preference", "r_sol", "no_exchange", "apart", "comas", "shuffled"),
)
"""Rows of the README's."""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Difference of two arms in per cent."""

    first: str
    second: str
    num_seeds: int
    mean: float
    low: float
    high: float
    bootstrap_low: float
    bootstrap_high: float
    p: float


def matrix(cells: Sequence[Cell], figure: str) -> np.ndarray:
    """Per cent right by seed and problem, ``[seed, problem]``, in the order of the cells."""
    return np.array([cell["problems"][figure] for cell in cells], dtype=float)


@cache
def _shares(size: int, resamples: int, seed: int) -> np.ndarray:
    """Shares of seeds or problems in every draw, ``[draw, item]``; those of one size serve all contrasts."""
    return np.concatenate(list(draw_counts(size, resamples, seed))) / size


def contrast(
    first: str, second: str, cells: Sequence[Cell], figure: str, *, resamples: int = 4000
) -> Contrast | None:
    """The difference of two arms over the seeds that both have; ``None`` below two seeds."""
    by_arm = {arm: {cell["seed"]: cell for cell in cells if cell["arm"] == arm} for arm in (first, second)}
    seeds = sorted(by_arm[first].keys() & by_arm[second].keys())
    if len(seeds) < 2:
        return None
    left, right = (matrix([by_arm[arm][seed] for seed in seeds], figure) for arm in (first, second))
    change = left - right
    by_seed = change.mean(axis=1)
    mean, low, high = mean_interval(by_seed.tolist())
    seeds_D, problems_D = (_shares(size, resamples, place) for place, size in enumerate(change.shape))
    draws = ((seeds_D @ change) * problems_D).sum(axis=1)
    if np.ptp(by_seed) == 0:
        p = float(not by_seed.any())  # all seeds differ by the same
    else:
        p = float(stats.ttest_1samp(by_seed, 0.0).pvalue)
    return Contrast(
        first=first,
        second=second,
        num_seeds=len(seeds),
        mean=mean,
        low=low,
        high=high,
        bootstrap_low=float(np.quantile(draws, 0.025)),
        bootstrap_high=float(np.quantile(draws, 0.975)),
        p=p,
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def arm_table(
    cells: Sequence[Cell], untrained: Cell | None, texts: Mapping[str, str], *, named: Sequence[Cell] = ()
) -> str:
    """One row an arm: accuracy by figure, tokens, minutes.

    Args:
        cells: Of a bed.
        untrained: Its policy before training.
        texts: By arm, in the order of the rows.
        named: More cells for the last column, the replies that name the known answer.
    """
    titles = ["arm", "seeds", "learning rate", *FIGURES.values(), "sampled / total tokens", "minutes"]
    titles += ["named, T = 0 and 1 (seeds)"]
    rows = [titles, ["---"] * len(titles)]
    if untrained is not None:
        own = [f"{matrix([untrained], figure).mean():.1f}" for figure in FIGURES]
        rows.append(["untrained", "", "", *own, "", "", _lenient([untrained])])
    for arm in texts:
        found = [cell for cell in cells if cell["arm"] == arm]
        if not found:
            continue
        figures = [_with_interval(matrix(found, figure).mean(axis=1)) for figure in FIGURES]
        tokens = [np.mean([cell["tokens"][name] for cell in found]) / 1000 for name in ("sampled", "total")]
        rates = sorted({f"{cell['learning_rate']:g}" for cell in found})
        minutes = np.mean([cell["seconds"] for cell in found]) / 60
        label = f"`{arm}`: {texts[arm]}"
        own = [
            f"{tokens[0]:.0f}k / {tokens[1]:.0f}k",
            f"{minutes:.1f}",
            _lenient([*found, *(cell for cell in named if cell["arm"] == arm)]),
        ]
        rows.append([label, str(len(found)), ", ".join(rates), *figures, *own])
    return markdown(rows if any(row[-1] for row in rows[2:]) else [row[:-1] for row in rows])


def _lenient(cells: Sequence[Cell]) -> str:
    """Per cent of replies that name the known answer, of the cells that were so measured; empty without any."""
    known = [cell for cell in cells if "greedy_lenient" in cell["problems"]]
    if not known:
        return ""
    greedy, sampled = (matrix(known, figure).mean() for figure in ("greedy_lenient", "sampled_lenient"))
    return f"{greedy:.1f}, {sampled:.1f} ({len(known)})"


def results_table(
    cells: Sequence[Cell],
    beds: Sequence[str],
    *,
    arms: Sequence[str] = tuple(RESULTS),
    as_gains: bool = False,
) -> str:
    """Per cent right at temperatures 0 and 1 on the beds: mean and half of its 95 % interval over seeds.

    A bed's most frequent number of seeds goes without saying; others stand in brackets.

    Args:
        cells: Of the ledger, without seeds that are thrown away.
        beds: Their names.
        arms: The rows.
        as_gains: Points over the untrained policy of the bed in place of per cent: what one bed predicts of another.
    """
    heads = [f"`{bed}`, T = 0 | T = 1" for bed in beds]
    lines = [f"| trained on | {' | '.join(heads)} |", "|---" * (2 * len(beds) + 1) + "|"]
    by_place: dict[tuple[object, object], list[Cell]] = {}
    for cell in cells:
        by_place.setdefault((cell["bed"], cell["arm"]), []).append(cell)
    usual = {
        bed: statistics.mode([len(by_place[place]) for place in by_place if place[0] == bed] or [0])
        for bed in beds
    }
    for arm in arms:
        row = [
            _mean(
                by_place.get((bed, arm), []),
                figure,
                less=float(matrix(by_place[bed, "untrained"], figure).mean()) if as_gains else None,
            )
            + (_seeds(by_place.get((bed, arm), []), usual[bed]) if figure == "greedy" else "")
            for bed in beds
            for figure in ("greedy", "sampled")
        ]
        if any(row) and not (as_gains and arm == "untrained"):
            lines.append(f"| {RESULTS[arm]} | {' | '.join(row)} |")
    return "\n".join(lines)


def _seeds(cells: Sequence[Cell], usual: int) -> str:
    """The number of seeds of an arm, where it is told by nothing else."""
    return f" ({len(cells)})" if len(cells) not in (usual, 0, 1, 2) else ""


def _mean(
    cells: Sequence[Cell], figure: str, *, less: float | None = None, members: np.ndarray | None = None
) -> str:
    """The mean with half of its interval; of fewer than three seeds, whose interval says nothing, each one's figure.

    Args:
        cells: Of one arm.
        figure: Of `FIGURES`.
        less: What is taken away from all of them; the figures are gains then, and have a sign.
        members: Whether a problem counts, ``[P]``; by default all do.
    """
    ordered = sorted(cells, key=lambda cell: cell["seed"])
    by_problem = [matrix([cell], figure)[0] for cell in ordered]
    by_seed = [
        float((each if members is None else each[members]).mean()) - (less or 0.0) for each in by_problem
    ]
    sign = "" if less is None else "+"
    if len(cells) < 3:
        return ", ".join(f"{each:{sign}.1f}" for each in by_seed)
    mean, _, high = mean_interval(by_seed)
    return f"{mean:{sign}.1f} ± {high - mean:.1f}"


def contrast_table(cells: Sequence[Cell], named: Sequence[tuple[str, str]]) -> str:
    """One row a contrast, at temperature 0 and 1; empty without two seeds of any."""
    rows = [["contrast", "seeds", "temperature", "points", "bootstrap", "p", "p by Holm"]]
    rows.append(["---"] * len(rows[0]))
    for figure in ("greedy", "sampled"):
        found = [each for pair in named if (each := contrast(*pair, cells, figure)) is not None]
        for each, adjusted in zip(found, holm([each.p for each in found]), strict=True):
            points = f"{each.mean:+.1f} ({each.low:+.1f} to {each.high:+.1f})"
            own = f"{each.bootstrap_low:+.1f} to {each.bootstrap_high:+.1f}"
            name = f"`{each.first}` - `{each.second}`"
            temperature = "0" if figure == "greedy" else "1"
            rows.append(
                [name, str(each.num_seeds), temperature, points, own, f"{each.p:.2g}", f"{adjusted:.2g}"]
            )
    return markdown(rows) if len(rows) > 2 else ""


def at_rate(cells: Sequence[Cell], rate: float) -> list[Cell]:
    """The cells of one learning rate."""
    return [each for each in cells if each.get("learning_rate") == rate]


def rate_table(cells: Sequence[Cell], named: Sequence[tuple[str, str]]) -> str:
    """Arms at the learning rate that was not chosen, and contrasts at one rate that is not the chosen one of both.

    An arm's figures are per cent by seed, a contrast's are points, from three seeds on; none was named before, so there
    are no p-values.

    Args:
        cells: Of a bed, at any learning rate.
        named: Arms, first less second.
    """
    rates = sorted({each["learning_rate"] for each in cells if "learning_rate" in each})
    rows = [["at one learning rate", "rate", "seeds", "temperature 0", "temperature 1"], ["---"] * 5]
    others = sorted((each for each in cells if each.get("other_rate")), key=lambda each: each["seed"])
    for arm, rate in dict.fromkeys((each["arm"], each["learning_rate"]) for each in others):
        own = [each for each in others if each["arm"] == arm]
        by_seed = [
            ", ".join(f"{per_cent:.0f}" for per_cent in matrix(own, figure).mean(axis=1))
            for figure in ("greedy", "sampled")
        ]
        rows.append([f"`{arm}`", f"{rate:g}", str(len(own)), *by_seed])
    for pair, rate in itertools.product(named, rates):
        own = at_rate(cells, rate)
        found = [contrast(*pair, own, figure) for figure in ("greedy", "sampled")]
        is_new = any(each["arm"] in pair and each.get("other_rate") for each in own)
        if is_new and (known := [each for each in found if each is not None and each.num_seeds > 2]):
            points = [f"{each.mean:+.1f} ({each.low:+.1f} to {each.high:+.1f})" for each in known]
            rows.append([f"`{pair[0]}` - `{pair[1]}`", f"{rate:g}", str(known[0].num_seeds), *points])
    return markdown(rows) if len(rows) > 2 else ""


def group_table(
    cells: Sequence[Cell], untrained: Cell | None, groups: Sequence[str], arms: Sequence[str]
) -> str:
    """Accuracy at temperature 0 and 1, and of the majority, by group of problems, as `results_table` tells it."""
    names = sorted(set(groups))
    members = {name: np.array([group == name for group in groups]) for name in names}
    titles = ["arm", *(f"{name}, {figure}" for figure in ("T = 0", "T = 1", "maj@8") for name in names)]
    rows = [titles, ["---"] * len(titles)]
    for arm in ("untrained", *arms):
        found = [cell for cell in cells if cell["arm"] == arm]
        if arm == "untrained" and untrained is not None:
            found = [untrained]
        if found:
            values = [
                _mean(found, figure, members=members[name])
                for figure in ("greedy", "sampled", "majority")
                for name in names
            ]
            rows.append([f"`{arm}`" if arm != "untrained" else arm, *values])
    return markdown(rows)


def conversation_table(
    cells: Sequence[Cell], untrained: Cell | None, arms: Sequence[str], kinds: Sequence[str]
) -> str:
    """One row an arm: share of first and of final solutions in test conversations that are right; empty without any."""
    titles = ["in conversation", "seeds", "first solutions right", "final ones", "final less first"]
    rows = [titles, ["---"] * len(titles)]
    for kind in kinds:
        groups = {f"untrained, {kind}": [] if untrained is None else [untrained]}
        groups |= {f"`{arm}`": [cell for cell in cells if cell["arm"] == arm] for arm in arms}
        for name, own in groups.items():
            talked = [talk[kind] for cell in own if kind in (talk := cell.get("conversations", {}))]
            if talked:
                first, final = (
                    np.array([each[when] for each in talked]).mean(axis=1) for when in ("first", "final")
                )
                figures = [_with_interval(first), _with_interval(final), _with_interval(final - first, "+")]
                rows.append([name, str(len(talked)) if own[0] is not untrained else "", *figures])
    return markdown(rows) if len(rows) > 2 else ""


def _with_interval(values: np.ndarray, sign: str = "") -> str:
    """Mean over seeds, with its interval where there are several."""
    mean, low, high = mean_interval(values.tolist())
    told = f"{mean:{sign}.1f}"
    return f"{told} ({low:{sign}.1f} to {high:{sign}.1f})" if len(values) > 1 else told


def signal_table(cells: Sequence[Cell], arms: Sequence[str], named: Sequence[tuple[str, str]]) -> str:
    """Thousand total tokens up to the first rewarded sample, and up to half of plain samples being right.

    Of an arm, the mean with half of its 95 % interval over the seeds that got so far, and how many of how many did
    where some did not; of a contrast, the differences by seed, of the seeds of which both did. The second was not
    measured in the first cells.

    Args:
        cells: Of a bed.
        arms: The rows.
        named: Contrasts, first less second.
    """
    figures = ("tokens_to_signal", "tokens_to_half")
    rows = [["thousand total tokens up to", "the first reward", "half of plain samples right"], ["---"] * 3]
    by_arm = {arm: {cell["seed"]: cell for cell in cells if cell["arm"] == arm} for arm in arms}
    for arm, own in by_arm.items():
        columns = [_reached([cell[name] for cell in own.values() if name in cell]) for name in figures]
        rows += [[f"`{arm}`", *columns]] if own else []
    for first, second in named:
        columns = [_reached_apart(by_arm[first], by_arm[second], name) for name in figures]
        rows += [[f"`{first}` - `{second}`", *columns]] if any(columns) else []
    return markdown(rows)


def _reached(tokens: Sequence[float | None]) -> str:
    """Thousands of tokens of an arm, as `signal_table` tells them."""
    known = [each / 1000 for each in tokens if each is not None]
    told = f" ({len(known)} of {len(tokens)})" if len(known) < len(tokens) else ""
    if len(known) < 3:
        return (", ".join(f"{each:.1f}" for each in known) or "never") + told if tokens else ""
    mean, _, high = mean_interval(known)
    return f"{mean:.1f} ± {high - mean:.1f}{told}"


def _reached_apart(first: Mapping[object, Cell], second: Mapping[object, Cell], figure: str) -> str:
    """The same of one arm less another, by seed; empty below three."""
    pairs = [(first[seed].get(figure), second[seed].get(figure)) for seed in first.keys() & second.keys()]
    apart = [(one - other) / 1000 for one, other in pairs if one is not None and other is not None]
    if len(apart) < 3:
        return ""
    mean, low, high = mean_interval(apart)
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f}, {len(apart)} seeds)"


def long_table(cells: Sequence[Cell], texts: Mapping[str, str]) -> str:
    """One row a reward and rate: the judge's accuracy, that of samples, when these fell; empty without one.

    A step at which no pair of a right and a wrong answer was compared says nothing of the judge.
    """
    head = ["ten budgets", "learning rate", "seeds", *_FOLLOWED, *_TURNS, *_AT_THE_END]
    rows = [head, ["---"] * len(head)]
    rates = sorted({cell["learning_rate"] for cell in cells})
    for (arm, text), rate in itertools.product(texts.items(), rates):
        found = [cell for cell in cells if (cell["arm"], cell["learning_rate"]) == (arm, rate)]
        if not found:
            continue
        judges, samples = ([_curve(cell, metrics) for cell in found] for metrics in _FOLLOWED.values())
        turns = [turns_of(curve) for curve in samples]
        bests = [f"{100 * first:.0f} to {100 * best:.0f} at {step}" for first, best, step, _ in turns]
        falls = ["never" if fallen is None else str(fallen) for *_, fallen in turns]
        own = [_by_tenths(judges), _by_tenths(samples), ", ".join(bests), ", ".join(falls)]
        ends = [_with_interval(matrix(found, figure).mean(axis=1)) for figure in _AT_THE_END.values()]
        rows.append([text, f"{rate:g}", str(len(found)), *own, *ends])
    return markdown(rows) if len(rows) > 2 else ""


def turns_of(curve: Sequence[float | None]) -> tuple[float, float, int, int | None]:
    """Turns of a curve, in means of a thirtieth of its steps in a row, of three at least, named by the last.

    Returns:
        The first mean; the best; its step; and the first step below half of the best one before, ``None`` without one.
    """
    width = max(3, len(curve) // 30)
    means = np.convolve(np.array(curve, dtype=float), np.ones(width) / width, mode="valid")
    fallen = np.flatnonzero(means < np.fmax.accumulate(means) / 2)
    best = int(np.nanargmax(means))
    return float(means[0]), float(means[best]), best + width, int(fallen[0]) + width if fallen.size else None


def _curve(cell: Cell, metrics: Sequence[str]) -> Sequence[float | None]:
    """The curve of the metric that a run has, or a single step that was not measured."""
    return next((cell["curve"][name] for name in metrics if name in cell["curve"]), [None])


def _by_tenths(curves: Sequence[Sequence[float | None]]) -> str:
    """Means over seeds of the tenths 1, 2, 5 and 10."""
    tenths = np.array([_tenths(curve) for curve in curves])
    return ", ".join(_per_cent(tenths[:, place]) for place in (0, 1, 4, 9))


def _per_cent(shares: np.ndarray) -> str:
    """The mean of those that were measured."""
    known = shares[np.isfinite(shares)]
    return f"{100 * known.mean():.0f}" if known.size else "?"


def _tenths(values: Sequence[float | None]) -> list[float]:
    """Means of the tenths of a curve; nan where nothing was measured."""
    parts = np.array_split(np.array(values, dtype=float), 10)
    return [float(np.nanmean(part)) if np.isfinite(part).any() else math.nan for part in parts]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a table, the head and its rule among them."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
