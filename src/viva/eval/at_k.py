"""pass@k and maj@k from n answers: the exact means over all choices of k of them, so neither is biased.

``pass_at_k`` is equation 1 of Chen et al. (2021, arXiv 2107.03374): ``1 - C(n - c, k) / C(n, k)`` with c of n answers
right. Putting the share of right answers into ``1 - (1 - p)^k`` instead is biased downwards. ``majority_at_k`` does the
same for the vote of k answers (self-consistency, Wang et al. 2022, arXiv 2203.11171), which has no such closed form:
the number of choices in which an answer wins is counted by multiplying small polynomials, in whole numbers.
"""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import comb
from typing import TypeAlias

__all__ = ["Vote", "ladder", "majority_at_k", "pass_at_k", "plurality"]

Vote: TypeAlias = tuple[str | None, bool]
"""What an answer says, and whether it is right. ``None`` casts no vote, but counts in n and k all the same."""


def ladder(num_answers: int) -> list[int]:
    """The values of k that are shown for n answers: powers of two from 2 on, and n itself."""
    ks = [2**power for power in range(1, num_answers.bit_length()) if 2**power < num_answers]
    return [*ks, num_answers] if num_answers > 1 else []


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Chance that at least one of k answers is right, k being chosen from n without replacement.

    Raises:
        ValueError: Unless 1 <= k <= n and 0 <= c <= n.
    """
    _check(num_answers, k)
    if not 0 <= num_right <= num_answers:
        raise ValueError(f"the number of right answers must be from 0 to {num_answers}; got {num_right}")
    return float(1 - Fraction(comb(num_answers - num_right, k), comb(num_answers, k)))


def majority_at_k(votes: Sequence[Vote], k: int) -> float:
    """Chance that the most frequent of k answers is right, k being chosen from n without replacement.

    Answers that tie for the first place share it equally. Where answers with one and the same vote are graded
    differently, which a grader that reads more than the final answer can do, the vote counts by the share of right
    ones. If nobody votes, the result is wrong.

    Raises:
        ValueError: Unless 1 <= k <= n.
    """
    _check(len(votes), k)
    counts = Counter(vote for vote, _ in votes if vote is not None)
    right = Counter(vote for vote, is_right in votes if vote is not None and is_right)
    silent = len(votes) - counts.total()
    total = Fraction(0)
    chances: dict[int, Fraction] = {}  # answers given equally often are equally likely to win
    for vote, num_right in right.items():
        count = counts[vote]
        if count not in chances:
            others = (counts - Counter({vote: count})).values()
            chances[count] = _chance_to_win(count, list(others), silent, k)
        total += chances[count] * Fraction(num_right, count)
    return float(total)


def plurality(votes: Sequence[Vote]) -> float:
    """`majority_at_k` of all answers: whether the most frequent one is right, ties sharing; 0 without a vote."""
    counts = Counter(vote for vote, _ in votes if vote is not None)
    most = max(counts.values(), default=0)
    winners = [vote for vote, count in counts.items() if count == most]
    right = Counter(vote for vote, is_right in votes if vote is not None and is_right)
    return float(sum(Fraction(right[vote], most) for vote in winners) / len(winners)) if winners else 0.0


def _chance_to_win(count: int, others: list[int], silent: int, k: int) -> Fraction:
    """Of an answer given `count` times to be the most frequent of k; a tie of t + 1 counts 1 / (t + 1)."""
    num_answers = count + sum(others) + silent
    wins = Fraction(0)
    for drawn in range(1, min(count, k) + 1):
        for ties, choices in enumerate(_choices(others, silent, drawn, k - drawn)):
            wins += Fraction(comb(count, drawn) * choices, ties + 1)
    return wins / comb(num_answers, k)


def _choices(others: list[int], silent: int, most: int, size: int) -> list[int]:
    """Ways to choose `size` answers of which none is given more than `most` times, by how many are given so often."""
    able = [count for count in others if count >= most]  # the others cannot get there: they are chosen freely
    free = silent + sum(others) - sum(able)
    ways: Counter[tuple[int, int]] = Counter(
        {(0, 0): 1}
    )  # by how many are chosen, and how many are at the limit
    for count in able:
        longer: Counter[tuple[int, int]] = Counter()
        for (chosen, tied), number in ways.items():
            for drawn in range(min(most, size - chosen) + 1):
                longer[chosen + drawn, tied + (drawn == most)] += number * comb(count, drawn)
        ways = longer
    by_ties = [0] * (len(able) + 1)
    for (chosen, tied), number in ways.items():
        by_ties[tied] += number * comb(free, size - chosen)
    return by_ties


def _check(num_answers: int, k: int) -> None:
    if not 1 <= k <= num_answers:
        raise ValueError(f"k must be from 1 to the number of answers, {num_answers}; got {k}")
