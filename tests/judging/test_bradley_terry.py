import itertools
import math
import random
from typing import cast

import choix
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from viva.judging.ballots import Item, Preference, Tie, Vote, map_vote
from viva.judging.bradley_terry import (
    BradleyTerryError,
    BradleyTerryFit,
    Duel,
    fit_bradley_terry,
)

LETTERS = (0, 1, 2, 3)


@st.composite
def some_votes(draw: st.DrawFn) -> Vote:
    one, other = draw(st.lists(st.sampled_from(LETTERS), min_size=2, max_size=2, unique=True))
    return draw(st.sampled_from((Preference(one, other), Tie(one, other))))


@st.composite
def some_duels(draw: st.DrawFn) -> Duel:
    one, other = draw(st.lists(st.sampled_from(LETTERS), min_size=2, max_size=2, unique=True))
    return Duel(
        first=one,
        second=other,
        share=draw(st.floats(0, 1)),
        weight=draw(st.floats(0, 3)),
        first_shown_first=draw(st.sampled_from((None, True, False))),
    )


votes_of_many = st.lists(some_votes(), max_size=20)
preferences = votes_of_many.map(lambda votes: [vote for vote in votes if isinstance(vote, Preference)])
duels = st.lists(some_duels(), max_size=12)
precisions = st.sampled_from((0.05, 0.5, 1.0, 4.0))


def reverse(vote: Vote) -> Vote:
    return Preference(vote.loser, vote.winner) if isinstance(vote, Preference) else vote


def strengths(fit: BradleyTerryFit) -> list[float]:
    return [fit.strengths[item] for item in fit.items]


def unanimous(order: tuple[Item, ...], voters: int) -> list[Vote]:
    return [Preference(one, other) for one, other in itertools.combinations(order, 2)] * voters


@given(preferences, precisions)
def test_agrees_with_choix_whose_alpha_is_half_the_precision(
    votes: list[Preference], precision: float
) -> None:
    data = [(cast(int, vote.winner), cast(int, vote.loser)) for vote in votes]
    expected = choix.opt_pairwise(len(LETTERS), data, alpha=precision / 2, tol=1e-12)
    fit = fit_bradley_terry(votes, LETTERS, prior_precision=precision)
    np.testing.assert_allclose(strengths(fit), expected, atol=1e-5)


@settings(max_examples=30)
@given(duels, precisions, st.booleans())
def test_soft_weighted_and_ordered_duels_minimise_the_stated_objective(
    rows: list[Duel], precision: float, with_position: bool
) -> None:
    def objective(x: np.ndarray) -> float:
        total = 0.5 * precision * float(x @ x)
        for duel in rows:
            shown = {None: 0, True: 1, False: -1}[duel.first_shown_first]
            margin = x[cast(int, duel.first)] - x[cast(int, duel.second)] + x[4] * shown * with_position
            total += duel.weight * (
                duel.share * np.logaddexp(0, -margin) + (1 - duel.share) * np.logaddexp(0, margin)
            )
        return float(total)

    expected = minimize(objective, np.zeros(5), method="BFGS", options={"gtol": 1e-7}).x
    fit = fit_bradley_terry(rows, LETTERS, prior_precision=precision, with_position=with_position)
    np.testing.assert_allclose([*strengths(fit), fit.position], expected, atol=2e-4)


@given(votes_of_many, st.permutations(LETTERS))
def test_relabelling_permutes_strengths_and_errors(votes: list[Vote], names: list[int]) -> None:
    to = dict(zip(LETTERS, names, strict=True))
    fit = fit_bradley_terry(votes, LETTERS)
    renamed = fit_bradley_terry([map_vote(vote, lambda item: to[cast(int, item)]) for vote in votes], LETTERS)
    for item in LETTERS:
        assert renamed.strengths[to[item]] == pytest.approx(fit.strengths[item], abs=1e-9)
        assert renamed.standard_errors[to[item]] == pytest.approx(fit.standard_errors[item], abs=1e-9)


@given(votes_of_many)
def test_reversing_every_vote_negates_the_strengths(votes: list[Vote]) -> None:
    fit = fit_bradley_terry(votes, LETTERS)
    mirrored = fit_bradley_terry([reverse(vote) for vote in votes], LETTERS)
    np.testing.assert_allclose(strengths(mirrored), [-s for s in strengths(fit)], atol=1e-9)
    np.testing.assert_allclose(mirrored.covariance, fit.covariance, atol=1e-9)


@given(duels, st.randoms(use_true_random=False))
def test_the_order_of_the_votes_changes_nothing_at_all(rows: list[Duel], rng: random.Random) -> None:
    shuffled = list(rows)
    rng.shuffle(shuffled)
    assert fit_bradley_terry(shuffled, LETTERS) == fit_bradley_terry(rows, LETTERS)


@given(votes_of_many)
def test_strengths_sum_to_zero(votes: list[Vote]) -> None:
    assert sum(strengths(fit_bradley_terry(votes, LETTERS))) == pytest.approx(0.0, abs=1e-8)


@given(votes_of_many)
def test_an_item_nobody_voted_on_stays_at_the_prior(votes: list[Vote]) -> None:
    fit = fit_bradley_terry(votes, [*LETTERS, ("revised", 7)])
    assert fit.scores["revised", 7] == pytest.approx(0.5)
    assert fit.standard_errors["revised", 7] == pytest.approx(0.25)
    alone = fit_bradley_terry(votes, LETTERS)
    np.testing.assert_allclose(strengths(fit)[:4], strengths(alone), atol=1e-8)


@given(votes_of_many)
def test_a_tie_is_half_a_win_for_each(votes: list[Vote]) -> None:
    twice: list[Vote] = []
    for vote in votes:
        if isinstance(vote, Tie):
            twice += [Preference(vote.first, vote.second), Preference(vote.second, vote.first)]
        else:
            twice += [vote, vote]
    halves = [
        Duel(first=vote.winner, second=vote.loser, share=1.0, weight=0.5)
        for vote in twice
        if isinstance(vote, Preference)
    ]
    assert strengths(fit_bradley_terry(halves, LETTERS)) == pytest.approx(
        strengths(fit_bradley_terry(votes, LETTERS)), abs=1e-8
    )


def test_empty_ballots_leave_every_score_in_the_middle() -> None:
    fit = fit_bradley_terry([], LETTERS, prior_precision=4.0)
    assert fit.scores == dict.fromkeys(LETTERS, 0.5)
    assert fit.standard_errors == pytest.approx(dict.fromkeys(LETTERS, 0.125))
    assert fit.gain(0, 1).value == 0.0


def test_no_items_fit_to_nothing() -> None:
    assert fit_bradley_terry([], []).scores == {}


def test_known_values() -> None:
    one = fit_bradley_terry([Preference(0, 1)], [0, 1])
    assert list(one.scores.values()) == pytest.approx([0.584, 0.416], abs=1e-3)
    four = fit_bradley_terry(unanimous(LETTERS, voters=4), LETTERS)
    assert list(four.scores.values()) == pytest.approx([0.832, 0.623, 0.377, 0.168], abs=1e-3)
    cycle = fit_bradley_terry([Preference(0, 1), Preference(1, 2), Preference(2, 0)], LETTERS)
    assert strengths(cycle) == pytest.approx([0.0] * 4, abs=1e-12)


def test_an_agent_nobody_compared_does_not_end_on_top() -> None:
    fit = fit_bradley_terry(unanimous((0, 1, 2), voters=4), LETTERS)
    assert fit.scores[0] > fit.scores[3] > fit.scores[2]


def test_a_weak_prior_and_unanimous_votes_still_fit() -> None:
    precision = 1e-6
    fit = fit_bradley_terry(unanimous(LETTERS, voters=4), LETTERS, prior_precision=precision)
    gradient = precision * fit.strengths[0] - 4 * sum(
        1 / (1 + math.exp(fit.strengths[0] - fit.strengths[other])) for other in (1, 2, 3)
    )
    assert gradient == pytest.approx(0.0, abs=precision * 1e-3)


@pytest.mark.parametrize("precision", [1e-100, 1e-300])
def test_a_fit_that_does_not_converge_raises(precision: float) -> None:
    with pytest.raises(BradleyTerryError, match=r"of 4 items did not converge .* larger prior_precision"):
        fit_bradley_terry(unanimous(LETTERS, voters=4), LETTERS, prior_precision=precision)


@settings(max_examples=25)
@given(votes_of_many)
def test_standard_errors_are_the_inverse_of_a_numerical_hessian(votes: list[Vote]) -> None:
    fit = fit_bradley_terry(votes, LETTERS)
    hessian = np.eye(4)
    for vote in votes:
        i, j = (vote.winner, vote.loser) if isinstance(vote, Preference) else (vote.first, vote.second)
        chance = 1 / (1 + math.exp(fit.strengths[j] - fit.strengths[i]))
        direction = np.eye(4)[cast(int, i)] - np.eye(4)[cast(int, j)]
        hessian += chance * (1 - chance) * np.outer(direction, direction)
    np.testing.assert_allclose(fit.covariance, np.linalg.inv(hessian), atol=1e-6)
    for item in LETTERS:
        slope = fit.scores[item] * (1 - fit.scores[item])
        expected = slope * math.sqrt(np.linalg.inv(hessian)[item, item])
        assert fit.standard_errors[item] == pytest.approx(expected, abs=1e-6)


def test_standard_errors_cover_the_truth_of_simulated_voters() -> None:
    rng = np.random.default_rng(0)
    covered: list[bool] = []
    for _ in range(150):
        truth = rng.normal(size=4)
        votes: list[Vote] = []
        for i, j in itertools.combinations(LETTERS, 2):
            for _voter in range(6):
                first_wins = rng.random() < 1 / (1 + math.exp(truth[j] - truth[i]))
                votes.append(Preference(i, j) if first_wins else Preference(j, i))
        fit = fit_bradley_terry(votes, LETTERS)
        gap = truth[0] - truth[1]
        c = fit.covariance
        error = math.sqrt(c[0][0] + c[1][1] - 2 * c[0][1])
        covered.append(abs(fit.strengths[0] - fit.strengths[1] - gap) < 1.96 * error)
    assert 0.90 <= np.mean(covered) <= 0.99


def test_a_gain_within_one_fit_counts_what_was_fitted_together() -> None:
    before, after = ("initial", 0), ("revised", 0)
    fit = fit_bradley_terry([Preference(after, before)] * 3, [before, after])
    gain = fit.gain(before, after)
    assert gain.value == pytest.approx(fit.scores[after] - fit.scores[before])
    assert gain.value > 0 > fit.gain(after, before).value
    slope = fit.scores[after] * (1 - fit.scores[after])
    (vb, c), (_, va) = fit.covariance
    assert gain.standard_error == pytest.approx(slope * math.sqrt(va + vb - 2 * c))
    assert c > 0
    assert gain.standard_error < math.hypot(fit.standard_errors[before], fit.standard_errors[after])
    assert fit.gain(before, before) == pytest.approx((0.0, 0.0))


def test_only_a_joint_scale_sees_that_everybody_improved() -> None:
    first = unanimous(tuple(("initial", k) for k in range(4)), voters=4)
    second = unanimous(tuple(("revised", k) for k in range(4)), voters=4)
    better: list[Vote] = [Preference(("revised", k), ("initial", k)) for k in range(4) for _ in range(3)]
    items: list[Item] = [(stage, k) for stage in ("initial", "revised") for k in range(4)]
    joint = fit_bradley_terry([*first, *second, *better], items)
    for k in range(4):
        gain = joint.gain(("initial", k), ("revised", k))
        assert gain.value > gain.standard_error > 0
    separate = [
        fit_bradley_terry(
            [map_vote(vote, lambda item: cast(tuple[str, int], item)[1]) for vote in votes], LETTERS
        )
        for votes in (first, second)
    ]
    assert separate[0].scores == separate[1].scores


def test_the_position_term_takes_the_bias_out_of_one_sided_shows() -> None:
    biased = [Duel(first=0, second=1, share=0.75, weight=20, first_shown_first=True)]
    biased += [Duel(first=1, second=2, share=0.75, weight=20, first_shown_first=True)]
    biased += [Duel(first=2, second=0, share=0.75, weight=20, first_shown_first=True)]
    fit = fit_bradley_terry(biased, LETTERS, prior_precision=0.01, with_position=True)
    assert fit.position == pytest.approx(math.log(3), abs=1e-2)
    assert strengths(fit) == pytest.approx([0.0] * 4, abs=1e-9)
    swapped = [
        Duel(first=d.second, second=d.first, share=1 - d.share, weight=d.weight, first_shown_first=False)
        for d in biased
    ]
    again = fit_bradley_terry(swapped, LETTERS, prior_precision=0.01, with_position=True)
    assert again.position == pytest.approx(fit.position)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share": 1.5}, r"share from 0 to 1 .* got 1\.5 and 1\.0"),
        ({"share": math.nan}, r"got nan"),
        ({"weight": -1.0}, r"got 0\.5 and -1\.0"),
        ({"weight": math.inf}, r"got 0\.5 and inf"),
        ({"second": 0}, r"two different items; got 0 twice"),
    ],
)
def test_an_impossible_duel_is_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Duel(**{"first": 0, "second": 1, "share": 0.5} | change)  # pyright: ignore[reportArgumentType]


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ValueError, match=r"items must differ .* got \[0, 0\]"):
        fit_bradley_terry([], [0, 0])
    with pytest.raises(ValueError, match=r"two of the items \[0, 1\]; got Preference\(winner=0, loser=2\)"):
        fit_bradley_terry([Preference(0, 2)], [0, 1])
    with pytest.raises(ValueError, match=r"positive number; got 0\.0\. Without a prior"):
        fit_bradley_terry([], [0, 1], prior_precision=0.0)
    fit = fit_bradley_terry([], [0, 1])
    with pytest.raises(ValueError, match=r"one of the fit's \[0, 1\]; got 2"):
        fit.gain(0, 2)
