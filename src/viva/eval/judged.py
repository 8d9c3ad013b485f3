"""Two policies without an answer key: a judge compares their answers to the same prompts in both orders.

Legend: ``_P`` prompts, ``_N`` pairs of answers to one prompt, ``_J`` judges. In every comparison, 0 is the first policy
and 1 the second.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from viva.conversation.coordinator import gather_or_cancel
from viva.conversation.guard import remembering
from viva.eval.direct import DirectSampler, ask_all
from viva.eval.estimates import (
    LengthTerm,
    Terms,
    draw_counts,
    figure_of,
    length_controlled_win_rate,
    summarise,
    term_of,
)
from viva.eval.records import Answer, Asked, Costs, Figure
from viva.judging.comparison import Comparison, Judge, JudgeError, Outcome, judge_accuracy, same_words
from viva.judging.judge import PolicyRef, SamplingClient
from viva.training.console import Begin, StepProgress, unseen
from viva.training.data import PromptItem, derive_seed

FAILURES = (JudgeError, TimeoutError, ValueError)
"""Errors of a judge about one answer or pair, which has no score then; the others go on."""
_ORDERS = ((0, 1), (1, 0))
_RESAMPLES = 1000
"""For the interval of one evaluation of a run."""
_Z95 = 1.959963984540054
"""Half of a 95 % interval, in standard errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPair:
    """One answer of each policy to the same prompt, and the verdicts on them."""

    question: str
    known: str | None
    answers: tuple[Answer, Answer]
    comparisons: tuple[Comparison, ...] = ()
    """In both orders."""

    @property
    def log_ratio(self) -> float:
        """Log of the first answer's length over the second's, in characters without outer white space."""
        first, second = (math.log(max(1, len(answer.text.strip()))) for answer in self.answers)
        return first - second

    @property
    def points(self) -> list[float]:
        """The first policy's points in each readable verdict: win 1, tie 1/2, loss 0."""
        return _points(self.comparisons)

    @property
    def asked(self) -> list[Comparison]:
        """Comparisons that the judge was asked for, since the answers differ."""
        return [each for each in self.comparisons if each.was_asked]


def _points(comparisons: Iterable[Comparison]) -> list[float]:
    """The first policy's points in each readable verdict."""
    return [
        0.5 if each.outcome is Outcome.TIE else float((each.outcome is Outcome.A) == (each.first == 0))
        for each in comparisons
        if each.outcome is not Outcome.INVALID
    ]


def paired(first: Sequence[Asked], second: Sequence[Asked]) -> list[list[JudgedPair]]:
    """Answers of two policies to the same prompts: the n-th of one with the n-th of the other."""
    return [
        [
            JudgedPair(question=one.question, known=one.answer, answers=pair)
            for pair in zip(one.answers, other.answers, strict=True)
        ]
        for one, other in zip(first, second, strict=True)
    ]


async def judge_pairs(
    judge: Judge, pairs_P_N: Sequence[Sequence[JudgedPair]], seed: int, begin: Begin = unseen
) -> list[list[JudgedPair]]:
    """The pairs with the judge's verdicts in both orders.

    A judge that fails (no reply, no probabilities, a prompt too long for it) makes a failed comparison with the reason.
    """
    count = sum(len(pairs) for pairs in pairs_P_N)
    progress = begin("judge", count, "pairs of answers")

    async def judge_prompt(place: int, pairs_N: Sequence[JudgedPair]) -> list[JudgedPair]:
        with remembering({}):
            ready = judge
            try:
                if not all(same_words(*(answer.text for answer in pair.answers)) for pair in pairs_N):
                    own_seed = derive_seed(seed, "own answer", place)
                    ready = await judge.for_question(pairs_N[0].question, own_seed)
            except FAILURES as error:
                failed = failed_both_ways(*_ORDERS[0], error)
                judged = [replace(pair, comparisons=failed) for pair in pairs_N]
                for each in judged:
                    progress.on_group(each)
                return judged
            return await gather_or_cancel(
                _judge_pair(ready, pair, derive_seed(seed, "judge", place, number), progress)
                for number, pair in enumerate(pairs_N)
            )

    return await gather_or_cancel(judge_prompt(place, pairs) for place, pairs in enumerate(pairs_P_N))


def reason_of(error: Exception) -> str:
    """An error in words."""
    return str(error) or type(error).__name__


def failed_both_ways(one: int, other: int, error: Exception) -> tuple[Comparison, Comparison]:
    """Comparisons of two solutions in both orders by a judge that failed."""
    return _failed(one, other, error), _failed(other, one, error)


def _failed(first: int, second: int, error: Exception) -> Comparison:
    return Comparison(
        first=first, second=second, outcome=Outcome.INVALID, score=None, failure=reason_of(error)
    )


async def _judge_pair(judge: Judge, pair: JudgedPair, seed: int, progress: StepProgress) -> JudgedPair:
    texts = {place: answer.text for place, answer in enumerate(pair.answers)}

    async def compare(first: int, second: int) -> Comparison:
        try:
            return await judge.compare(pair.question, texts, first, second, derive_seed(seed, first))
        except FAILURES as error:
            return _failed(first, second, error)

    judged = replace(pair, comparisons=tuple(await gather_or_cancel(compare(*order) for order in _ORDERS)))
    progress.on_group(judged)
    return judged


def judged_figures(
    pairs_P_N: Sequence[Sequence[JudgedPair]], *, resamples: int, seed: int
) -> dict[str, Figure]:
    """Win rates of the first policy and figures about the judge, with 95 % intervals from resampled prompts.

    - ``win_rate``: points over readable verdicts, a tie counting half; answers of the same words tie.
    - ``win_rate/shown_first``, ``win_rate/shown_second``: the same, by the place of the first policy's answer.
    - ``win_rate/length_controlled``: see `length_controlled_win_rate`.
    - ``win_rate/expected``: mean of (1 + score) / 2, by the judge's probabilities; only where all verdicts have them.
    - ``tie_rate``: of readable verdicts. ``identical_rate``: of all comparisons, those that nobody was asked for.
    - ``invalid_rate``, ``failed_rate``: of comparisons asked, those without a readable verdict, and those of them in
      which the judge failed.
    - ``flip_rate``: of pairs with a winner in both orders, those whose winner changes with the order.
    - ``first_shown_rate``: of verdicts with a winner, those for the answer shown first; 50 % is no preference.
    - ``longer_rate``: of verdicts with a winner on answers of unequal lengths, those for the longer one.
    - ``accuracy``: of readable verdicts on a right and a wrong answer, those for the right one, a tie counting half.
    - ``pair_accuracy``: of such pairs, those whose scores of both orders together favour the right one; equal: half.

    Figures that nothing contributes to have no value; those of known answers and probabilities are left out.
    """
    figures = summarise(_terms(pairs_P_N), resamples=resamples, seed=seed)
    controlled = length_controlled_win_rate(
        [
            LengthTerm(
                prompt=place,
                log_ratio=pair.log_ratio,
                points=math.fsum(pair.points) / len(pair.points),
                num_verdicts=len(pair.points),
            )
            for place, pairs in enumerate(pairs_P_N)
            for pair in pairs
            if pair.points
        ],
        len(pairs_P_N),
        resamples=resamples,
        seed=seed,
    )
    return {"win_rate": figures.pop("win_rate"), "win_rate/length_controlled": controlled, **figures}


def _terms(pairs_P_N: Sequence[Sequence[JudgedPair]]) -> dict[str, Terms]:
    every = [each for pairs in pairs_P_N for pair in pairs for each in pair.comparisons]
    parts: dict[str, Callable[[JudgedPair], list[float]]] = {
        "win_rate": lambda pair: pair.points,
        "win_rate/shown_first": lambda pair: _points(each for each in pair.comparisons if each.first == 0),
        "win_rate/shown_second": lambda pair: _points(each for each in pair.comparisons if each.first == 1),
    }
    if any(each.probabilities for each in every) and all(
        each.probabilities for each in every if each.was_asked and each.score is not None
    ):
        parts["win_rate/expected"] = _expected
    parts |= {
        "tie_rate": lambda pair: [float(points == 0.5) for points in pair.points],
        "identical_rate": lambda pair: [float(not each.was_asked) for each in pair.comparisons],
        "invalid_rate": lambda pair: [float(each.score is None) for each in pair.asked],
        "failed_rate": lambda pair: [float(each.failure is not None) for each in pair.asked],
        "flip_rate": _flips,
        "first_shown_rate": lambda pair: [float(each.outcome is Outcome.A) for each in _decided(pair)],
        "longer_rate": _longer,
    }
    if any(pair.known is not None for pairs in pairs_P_N for pair in pairs):
        parts["accuracy"] = _accuracy
        parts["pair_accuracy"] = _pair_accuracy
    return {
        name: [term_of(value for pair in pairs for value in values(pair)) for pairs in pairs_P_N]
        for name, values in parts.items()
    }


def _expected(pair: JudgedPair) -> list[float]:
    signed = [(each.score, -1 if each.first == 0 else 1) for each in pair.comparisons]
    return [(1 + sign * score) / 2 for score, sign in signed if score is not None]


def _decided(pair: JudgedPair) -> list[Comparison]:
    return [each for each in pair.asked if each.outcome in (Outcome.A, Outcome.B)]


def _flips(pair: JudgedPair) -> list[float]:
    decided = _points(_decided(pair))
    return [float(decided[0] != decided[1])] if len(decided) == len(_ORDERS) else []


def _longer(pair: JudgedPair) -> list[float]:
    if not pair.log_ratio:
        return []
    return [float((points == 1.0) == (pair.log_ratio > 0)) for points in _points(_decided(pair))]


def _accuracy(pair: JudgedPair) -> list[float]:
    first, second = (answer.right for answer in pair.answers)
    if pair.known is None or first == second:
        return []
    return [points if first else 1.0 - points for points in pair.points]


def _pair_accuracy(pair: JudgedPair) -> list[float]:
    if pair.known is None:
        return []
    right = {place: answer.right for place, answer in enumerate(pair.answers)}
    found = judge_accuracy(pair.comparisons, right)
    return [found["judge/pair_accuracy"]] if found else []


def cohen_kappa(table: npt.NDArray[np.float64]) -> float | None:
    """Cohen's kappa (1960) of two judges' counts ``[class by one, class by the other]``: ``(p_o - p_e) / (1 - p_e)``.

    ``p_o`` is the share on the diagonal, ``p_e`` the sum of the products of both judges' shares of each class. ``None``
    without a pair, or where both name one and the same class only.
    """
    total = table.sum()
    if not total:
        return None
    shares = table / total
    expected = float(shares.sum(axis=1) @ shares.sum(axis=0))
    return (float(np.trace(shares)) - expected) / (1.0 - expected) if expected < 1.0 else None


def agreement_figures(
    one_P_N: Sequence[Sequence[JudgedPair]],
    other_P_N: Sequence[Sequence[JudgedPair]],
    *,
    resamples: int,
    seed: int,
) -> dict[str, Figure]:
    """Agreement of two judges on the same pairs: ``agreement``, the share of equal verdicts, and ``kappa``.

    A judge's verdict on a pair is the policy that has more points over both orders, else a tie: a winner that changes
    with the order is none. Pairs of the same words, and those that a judge has no readable verdict on, are left out.
    """
    tables = np.zeros((len(one_P_N), 3, 3))
    for place, (ones, others) in enumerate(zip(one_P_N, other_P_N, strict=True)):
        for one, other in zip(ones, others, strict=True):
            if one.asked and one.points and other.points:
                tables[place, _class_of(one), _class_of(other)] += 1
    shares = [(float(np.trace(table)), float(table.sum())) for table in tables]
    flat = tables.reshape(len(tables), 9)
    drawn = [
        math.nan if (kappa := cohen_kappa(row.reshape(3, 3))) is None else kappa
        for counts in draw_counts(len(tables), resamples, seed)
        for row in counts @ flat
    ]
    count = sum(number > 0 for _, number in shares)
    kappa = figure_of(cohen_kappa(tables.sum(axis=0)), np.array(drawn), num_problems=count)
    return summarise({"agreement": shares}, resamples=resamples, seed=seed) | {"kappa": kappa}


def _class_of(pair: JudgedPair) -> int:
    """0: the first policy wins, 1: a tie, 2: the second policy wins."""
    mean = math.fsum(pair.points) / len(pair.points)
    return 0 if mean > 0.5 else 2 if mean < 0.5 else 1


def figures_of_judges(
    judged_J: Mapping[str, Sequence[Sequence[JudgedPair]]], *, resamples: int, seed: int
) -> dict[str, Figure]:
    """`judged_figures` of every judge as ``judge/NAME/...``, and `agreement_figures` as ``judges/NAME+NAME/...``."""
    figures = {
        f"judge/{name}/{key}": figure
        for name, pairs_P_N in judged_J.items()
        for key, figure in judged_figures(pairs_P_N, resamples=resamples, seed=seed).items()
    }
    for one, other in itertools.combinations(judged_J, 2):
        found = agreement_figures(judged_J[one], judged_J[other], resamples=resamples, seed=seed)
        figures |= {f"judges/{one}+{other}/{key}": figure for key, figure in found.items()}
    return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class WinRateEvaluator:
    """A run's answers to test prompts against those of its policy before training, compared by a judge.

    Both policies answer once with the same seeds: before the first step all answers are equal, and nobody is asked.
    """

    items: Sequence[PromptItem]
    direct: DirectSampler
    start: PolicyRef
    """The policy before training."""
    judge: Judge
    _before: list[Asked] = field(default_factory=list[Asked])
    """Answers before training, once they are sampled."""

    async def __call__(
        self, sampler: SamplingClient, step: int, begin: Begin = unseen
    ) -> Mapping[str, float]:
        """``test/judged/...``: the figures of `judged_figures`, the win rate's standard error, and the tokens spent."""
        costs = Costs()
        if not self._before:  # not in the cost: a run that is resumed does it once more
            self._before.extend(await self._ask(self.start.current(), begin))
        with costs.part("judged"):
            pairs_P_N = paired(await self._ask(sampler, begin), self._before)
            judged = await judge_pairs(self.judge, pairs_P_N, self.direct.sampling.seed, begin)
        figures = judged_figures(judged, resamples=_RESAMPLES, seed=self.direct.sampling.seed)
        metrics = {name: figure.value for name, figure in figures.items() if figure.value is not None}
        won = figures["win_rate"]
        if won.low is not None and won.high is not None:
            metrics["win_rate_stderr"] = (won.high - won.low) / (2 * _Z95)
        cost = costs.tokens["judged"]
        metrics |= {"sampled_tokens": cost.sampled_tokens, "total_tokens": cost.total_tokens}
        return {f"test/judged/{name}": value for name, value in metrics.items()}

    async def _ask(self, sampler: SamplingClient, begin: Begin) -> tuple[Asked, ...]:
        return await ask_all(sampler, self.direct, self.items, 1, begin, "answers to be judged")
