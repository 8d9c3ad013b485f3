"""From the answers of a screening to figures.

The correlation of a reward with the truth is taken within groups, since only differences within a group are trained:
with ``a`` and ``b`` the rewards and the rightness of the answers to a problem, each less its mean over them,

    r = sum_P sum_N a b / sqrt(sum_P sum_N a^2 sum_P sum_N b^2)

over all problems, or over conversations and the final solutions of their agents. Groups that are all right or all wrong
add to the first sum below the root alone: what a reward pays there has nothing to do with the truth, but is trained on.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from viva.eval.estimates import (
    NOTHING,
    Term,
    Terms,
    draw_counts,
    figure_of,
    ladder,
    majority_at_k,
    pass_at_k,
    summarise,
    term_of,
)
from viva.eval.figures import conversation_figures
from viva.eval.records import Figure, PlayedProblem
from viva.eval.screening import Criticised, Screened, solutions_of
from viva.judging.answers import answer_groups
from viva.judging.ballots import ballot_accuracy
from viva.judging.comparison import Comparison, JudgeError, judge_accuracy, judge_health, reward_truth_gap
from viva.judging.records import ConversationRecord
from viva.judging.rubric import weighted_mean
from viva.rewards import NAMES, Reward, find_reward
from viva.rewards.base import UNPAID
from viva.rewards.rubric import Rubric
from viva.rewards.solutions import SolutionReward
from viva.training.data import derive_seed

LOW, HIGH = 0.2, 0.8
"""Shares of tries between which a problem is in reach."""
_ABOUT_TRUTH = ("correct/first", "correct/final", "correct/best", "rank_correlation", "reward_truth_gap")
_ABOUT_TALK = ("finish_rate", "void_rate", "tokens")
_Paid = tuple[list[bool], list[float]]
"""Rightness and pay of the members of a group."""


def screening_figures(
    problems_P: Sequence[Screened], rewards: Mapping[str, SolutionReward], *, resamples: int, seed: int
) -> dict[str, Figure]:
    """All figures with 95 % intervals over problems; those that need known answers only where all are known."""
    known = all(each.answer is not None for each in problems_P)
    terms = _replies(problems_P) | _opinions(problems_P) | _judge(problems_P, is_known=known)
    if known:
        terms = _accuracies(problems_P) | _reach(problems_P) | terms | _likelihood(problems_P)
    scored = next((each.inner for each in rewards.values() if isinstance(each.inner, Rubric)), None)
    if scored is not None and any(each.rubric for each in problems_P):
        terms |= _rubric(problems_P, scored)
    draws = derive_seed(seed, "bootstrap")
    figures = summarise(terms, resamples=resamples, seed=draws)
    for name, reward in rewards.items() if known else ():
        paid = [_paid(each, reward, derive_seed(seed, "reward", i)) for i, each in enumerate(problems_P)]
        figures[f"correlation/{name}"] = correlation(paid, resamples=resamples, seed=draws)
    return figures


async def conversation_screening(
    played: Mapping[str, Sequence[PlayedProblem]],
    critics: Sequence[Criticised],
    records: Mapping[str, Sequence[ConversationRecord]],
    *,
    is_known: bool,
    resamples: int,
    seed: int,
) -> dict[str, Figure]:
    """Figures of conversations by kind: those of evaluations, and the correlation of every reward with the truth.

    What is about the truth is there only where answers are known. `critics` are those of critique self-play, `records`
    the conversations that were held to their end, by kind.
    """
    terms = {
        f"{kind}/{name}": each
        for kind, talks in played.items()
        for name, each in conversation_figures(talks).items()
        if name in _ABOUT_TALK or (is_known and name in _ABOUT_TRUTH)
    }
    terms |= {f"critique/{name}": each for name, each in critic_figures(critics).items()}
    draws = derive_seed(seed, "bootstrap")
    figures = summarise(terms, resamples=resamples, seed=draws)
    rewards = [find_reward(name) for name in NAMES if name != "answers"]  # which is the truth itself
    for kind, own in records.items() if is_known else ():
        for reward in rewards:
            paid = [
                await _paid_agents(each, reward, derive_seed(seed, "reward", i)) for i, each in enumerate(own)
            ]
            if any(each is not None for each in paid):
                name = f"{kind}/correlation/{reward.name}"
                figures[name] = correlation(paid, resamples=resamples, seed=draws)
    return figures


async def _paid_agents(record: ConversationRecord, reward: Reward, seed: int) -> _Paid | None:
    """Whether final solutions are right, and what a reward pays their agents; ``None`` where it cannot be computed."""
    right = record.correct or {}
    try:
        paid = await reward.stored_pay(record, seed)
    except UNPAID:
        return None
    both = sorted(right.keys() & paid.keys())
    return [right[agent] for agent in both], [paid[agent] for agent in both]


def _accuracies(problems_P: Sequence[Screened]) -> dict[str, Terms]:
    votes_P = [_votes(each) for each in problems_P]
    n = len(votes_P[0])
    figures: dict[str, Terms] = {
        "accuracy/greedy": [(float(each.greedy.answer.right), 1.0) for each in problems_P],
        "accuracy/sampled": [(_num_right(each), n) for each in problems_P],
        "accuracy/greedy_lenient": [(float(each.greedy.is_lenient), 1.0) for each in problems_P],
        "accuracy/sampled_lenient": [
            (float(sum(one.is_lenient for one in each.tries_N)), n) for each in problems_P
        ],
    }
    for k in ladder(n):
        figures[f"accuracy/maj@{k}"] = [(majority_at_k(votes, k), 1.0) for votes in votes_P]
    figures[f"accuracy/pass@{n}"] = [(pass_at_k(n, _num_right(each), n), 1.0) for each in problems_P]
    figures["majority_less_sampled"] = [
        (majority_at_k(votes, n) - _num_right(each) / n, 1.0)
        for votes, each in zip(votes_P, problems_P, strict=True)
    ]
    figures["greedy_less_sampled"] = [
        (float(each.greedy.answer.right) - _num_right(each) / n, 1.0) for each in problems_P
    ]
    return figures


def _reach(problems_P: Sequence[Screened]) -> dict[str, Terms]:
    shares = [_num_right(each) / len(each.tries_N) for each in problems_P]
    return {
        "solved/in_20_to_80_percent": [(float(LOW <= share <= HIGH), 1.0) for share in shares],
        "solved/mixed": [(float(0 < share < 1), 1.0) for share in shares],
        "solved/never": [(float(share == 0), 1.0) for share in shares],
        "solved/always": [(float(share == 1), 1.0) for share in shares],
    }


def _replies(problems_P: Sequence[Screened]) -> dict[str, Terms]:
    return {
        "replies/finished": [term_of(one.answer.finished for one in each.tries_N) for each in problems_P],
        "replies/greedy_finished": [term_of([each.greedy.answer.finished]) for each in problems_P],
        "replies/answer_found": [term_of(one.has_answer for one in each.tries_N) for each in problems_P],
        "replies/tokens": [term_of(one.answer.num_tokens for one in each.tries_N) for each in problems_P],
    }


def _opinions(problems_P: Sequence[Screened]) -> dict[str, Terms]:
    """The share of the most frequent answer, and the entropy of the answers, of those that could be read."""
    counts_P = [Counter(vote for vote, _ in _votes(each) if vote is not None) for each in problems_P]
    return {
        "answers/agreement": [
            (max(counts.values()) / counts.total(), 1.0) if counts else NOTHING for counts in counts_P
        ],
        "answers/entropy_bits": [(_entropy(counts), 1.0) if counts else NOTHING for counts in counts_P],
    }


def _entropy(counts: Counter[str]) -> float:
    shares = [count / counts.total() for count in counts.values()]
    return -math.fsum(share * math.log2(share) for share in shares)


def _judge(problems_P: Sequence[Screened], *, is_known: bool) -> dict[str, Terms]:
    """Figures of judged pairs, in which the first answer is the right one where answers are known."""
    both_P = [each.judged.both if each.judged is not None else None for each in problems_P]
    if not any(both_P):
        return {}
    names = {"judge/position_bias": "judge/position_bias", "judge/invalid": "judge/invalid_rate"}
    health_P = [judge_health(both) if both is not None else {} for both in both_P]
    figures: dict[str, Terms] = {
        name: [term_of([health.get(key)]) for health in health_P] for name, key in names.items()
    }
    figures["judge/first_shown_nats"] = [NOTHING if both is None else _first_nats(both) for both in both_P]
    if is_known:
        right_P = [
            judge_accuracy(each.both, {each.first: True, each.second: False}) if each is not None else {}
            for each in (problem.judged for problem in problems_P)
        ]
        for name in ("judge/accuracy", "judge/pair_accuracy"):
            figures[name] = [term_of([right.get(name)]) for right in right_P]
    return figures


def _first_nats(both: Sequence[Comparison]) -> Term:
    """Mean log-odds of the answer that is shown first, in nats: 0 without bias, since each answer is first once."""
    odds = [
        math.log(each.probabilities[0] / each.probabilities[1])
        for each in both
        if each.probabilities is not None and min(each.probabilities[:2]) > 0
    ]
    return (math.fsum(odds) / 2, 1.0) if len(odds) == 2 else NOTHING


def _likelihood(problems_P: Sequence[Screened]) -> dict[str, Terms]:
    """Share of the pairs of a right and a wrong answer in which the right reply is the more probable one."""

    def pairs(problem: Screened, per_token: bool) -> Term:
        tries = [one for one in problem.tries_N if one.has_answer]
        values = [one.logprob / (one.answer.num_tokens if per_token else 1) for one in tries]
        return _right_above_wrong([one.answer.right for one in tries], values)

    return {
        "likelihood/accuracy": [pairs(each, False) for each in problems_P],
        "likelihood/accuracy_per_token": [pairs(each, True) for each in problems_P],
    }


def _rubric(problems_P: Sequence[Screened], reward: Rubric) -> dict[str, Terms]:
    """Figures of a judge's scores of single answers, the accuracy on those that can be read out of a reply."""
    weights_C = [each.weight for each in reward.criteria]

    def accuracy(problem: Screened) -> Term:
        scored = [
            (problem.tries_N[number].answer.right, score)
            for number, scores_C in (problem.rubric or {}).items()
            if problem.tries_N[number].has_answer
            and None not in scores_C
            and (score := weighted_mean(scores_C, weights_C)) is not None
        ]
        return _right_above_wrong([right for right, _ in scored], [score for _, score in scored])

    return {
        "rubric/accuracy": [accuracy(each) for each in problems_P],
        "rubric/invalid_rate": [
            term_of(float(None in scores_C) for scores_C in (each.rubric or {}).values())
            for each in problems_P
        ],
    }


def _right_above_wrong(right_N: Sequence[bool], values_N: Sequence[float]) -> Term:
    """Share of the pairs of a right and a wrong answer in which the right one has the higher value, equal ones half."""
    gap = reward_truth_gap(dict(enumerate(values_N)), dict(enumerate(right_N)))
    return NOTHING if gap is None else (1.0 - gap, 1.0)


def _votes(problem: Screened) -> list[tuple[str | None, bool]]:
    """Answers as numbers of groups of equal ones, and whether they are right; ``None`` for those that do not vote."""
    groups = answer_groups([one.answer.text if one.answer.finished else "" for one in problem.tries_N])
    return [
        (None if group is None else str(group), one.answer.right)
        for group, one in zip(groups, problem.tries_N, strict=True)
    ]


def _num_right(problem: Screened) -> int:
    return sum(one.answer.right for one in problem.tries_N)


def _paid(problem: Screened, reward: SolutionReward, seed: int) -> _Paid | None:
    """Whether each of the answers that were given to a problem is right, and its reward; ``None``: it is not known."""
    tries = [problem.tries_N[number] for number in problem.given]
    own = problem.greedy.answer  # of the policy as its own judge
    group = replace(solutions_of(tries, seed), judge_answer=own.text if own.finished else "")
    if problem.rubric is not None:
        group = replace(
            group, rubric={place: problem.rubric[number] for place, number in enumerate(problem.given)}
        )
    try:
        return [one.answer.right for one in tries], reward.pay(group)
    except JudgeError:  # a score that could not be read
        return None


def _centred(paid: _Paid | None) -> tuple[float, float, float]:
    """Sums over a group's answers, or a conversation's agents: of a b, a^2 and b^2, see the module."""
    if paid is None or len(paid[0]) < 2:
        return 0.0, 0.0, 0.0
    truth, values = (np.asarray(each, dtype=np.float64) for each in paid)
    a, b = values - values.mean(), truth - truth.mean()
    return float(a @ b), float(a @ a), float(b @ b)


def correlation(paid_P: Sequence[_Paid | None], *, resamples: int, seed: int) -> Figure:
    """Correlation within groups by rightness and pay of their members; ``None`` where nothing varies."""
    sums = np.array([_centred(paid) for paid in paid_P])
    (value,) = _ratios(sums.sum(axis=0, keepdims=True)).tolist()
    drawn = [_ratios(counts @ sums) for counts in draw_counts(len(sums), resamples, seed)]
    return figure_of(value, np.concatenate(drawn), num_problems=int((sums[:, 2] > 0).sum()))


def _ratios(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``[draw]``; not a number where nothing varies."""
    below = np.sqrt(sums[:, 1] * sums[:, 2])
    return np.divide(sums[:, 0], below, out=np.full(len(sums), np.nan), where=below > 1e-12)


def critic_figures(talks: Sequence[Criticised]) -> dict[str, Terms]:
    """Figures by conversation; those of pairs are means over them, so that a conversation counts once."""
    if not talks:
        return {}
    columns = {
        "critics": [_critic_pairs(talk) for talk in talks],
        "ballots": [ballot_accuracy(talk.ballots, talk.correct) for talk in talks],
        "judge": [judge_accuracy(talk.judged, talk.correct).get("judge/pair_accuracy") for talk in talks],
    }
    figures: dict[str, Terms] = {
        "critics/readable": [
            (sum(each.says_right is not None for each in talk.verdicts), len(talk.verdicts)) for talk in talks
        ],
        "critics/true": [_true_verdicts(talk) for talk in talks],
    }
    for name, values in columns.items():
        figures[f"{name}/pair_accuracy"] = [term_of([value]) for value in values]
    for name in ("critics", "ballots"):
        figures[f"{name}_less_judge"] = [
            NOTHING if own is None or other is None else (own - other, 1.0)
            for own, other in zip(columns[name], columns["judge"], strict=True)
        ]
    return figures


def _true_verdicts(talk: Criticised) -> Term:
    told = [each for each in talk.verdicts if each.says_right is not None]
    return sum(each.says_right is talk.correct[each.target] for each in told), len(told)


def _critic_pairs(talk: Criticised) -> float | None:
    said = {(each.critic, each.target): each.says_right for each in talk.verdicts}
    points: list[float] = []
    for right, wrong in talk.pairs:
        for critic in talk.correct:
            good, bad = said.get((critic, right)), said.get((critic, wrong))
            if good is not None and bad is not None:
                points.append(0.5 + 0.5 * (good - bad))
    return math.fsum(points) / len(points) if points else None
