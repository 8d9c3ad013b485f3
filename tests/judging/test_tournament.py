import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker_cookbook.rl import preference_envs

from viva.judging.comparison import (
    Comparison,
    NoValidComparisonsError,
    Outcome,
    TournamentPattern,
    judge_accuracy,
    judge_health,
    matchup_count,
    pairs,
    win_minus_loss,
    win_rate,
)

A, B, TIE, INVALID = Outcome.A, Outcome.B, Outcome.TIE, Outcome.INVALID
BOTH, ONE = TournamentPattern.ALL_PAIRS_BOTH_WAYS, TournamentPattern.ALL_PAIRS_ONE_WAY
SCORES = {A: -1.0, TIE: 0.0, B: 1.0, INVALID: None}
MIRROR = {A: B, B: A, TIE: TIE, INVALID: INVALID}


def compared(first: int, second: int, outcome: Outcome, score: float | None = None) -> Comparison:
    return Comparison(
        first=first, second=second, outcome=outcome, score=SCORES[outcome] if score is None else score
    )


def soft(first: int, second: int, score: float) -> Comparison:
    outcome = A if score < 0 else B if score > 0 else TIE
    return compared(first, second, outcome, score)


def swapped(comparison: Comparison) -> Comparison:
    score = None if comparison.score is None else -comparison.score
    return Comparison(
        first=comparison.second, second=comparison.first, outcome=MIRROR[comparison.outcome], score=score
    )


@st.composite
def tournaments(draw: st.DrawFn, *, invalid: bool = True) -> tuple[list[int], list[Comparison]]:
    """Agents with distinct ids and a judged tournament in which everybody has a valid matchup."""
    agent_ids = draw(st.lists(st.integers(0, 50), min_size=2, max_size=5, unique=True))
    comparisons: list[Comparison] = []
    for first, second in pairs(agent_ids, draw(st.sampled_from([BOTH, ONE]))):
        if invalid and draw(st.integers(0, 4)) == 0:
            comparisons.append(compared(first, second, INVALID))
        else:
            comparisons.append(soft(first, second, draw(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]))))
    seen = {agent for c in comparisons if c.score is not None for agent in (c.first, c.second)}
    if seen != set(agent_ids):
        comparisons = [soft(first, second, 0.5) for first, second in pairs(agent_ids, BOTH)]
    return agent_ids, comparisons


def seed_formula(comparisons: Sequence[Comparison], agent_ids: Sequence[int]) -> dict[int, float]:
    """The specification's loop, word for word."""
    total = dict.fromkeys(agent_ids, 0.0)
    count = dict.fromkeys(agent_ids, 0)
    for comparison in comparisons:
        if comparison.score is not None:
            i, j = comparison.first, comparison.second
            total[j] += comparison.score
            total[i] -= comparison.score
            count[i] += 1
            count[j] += 1
    return {agent_id: total[agent_id] / count[agent_id] for agent_id in agent_ids}


@pytest.mark.parametrize("pattern", [BOTH, ONE])
@pytest.mark.parametrize("n", range(6))
def test_pairs_are_those_of_the_cookbook(pattern: TournamentPattern, n: int) -> None:
    theirs = preference_envs.TournamentPattern(pattern)
    assert pairs(range(n), pattern) == pairs(range(n), theirs) == preference_envs.get_pairs(n, theirs)


def test_pairs_are_of_the_agents_that_are_there() -> None:
    assert pairs([0, 2], BOTH) == [(0, 2), (2, 0)]
    assert pairs([4, 1, 3], ONE) == [(4, 1), (4, 3), (1, 3)]
    with pytest.raises(ValueError, match=r"differ from one another; got \[1, 1\]"):
        pairs([1, 1], BOTH)


@given(tournaments())
def test_rewards_are_the_specifications(tournament: tuple[list[int], list[Comparison]]) -> None:
    agent_ids, comparisons = tournament
    expected = seed_formula(comparisons, agent_ids)
    assert win_minus_loss(comparisons, agent_ids) == pytest.approx(expected)
    assert list(win_minus_loss(comparisons, agent_ids)) == agent_ids


@given(tournaments(), st.permutations(range(51)))
def test_relabelling_agents_permutes_rewards(
    tournament: tuple[list[int], list[Comparison]], names: list[int]
) -> None:
    agent_ids, comparisons = tournament
    renamed = [
        Comparison(first=names[c.first], second=names[c.second], outcome=c.outcome, score=c.score)
        for c in comparisons
    ]
    for function in (win_minus_loss, win_rate, matchup_count):
        before = function(comparisons, agent_ids)
        after = function(renamed, [names[agent_id] for agent_id in agent_ids])
        assert after == {names[agent_id]: before[agent_id] for agent_id in agent_ids}


@given(tournaments(), st.randoms(use_true_random=False))
def test_neither_presentation_nor_line_order_nor_repetition_matters(
    tournament: tuple[list[int], list[Comparison]], rng: object
) -> None:
    agent_ids, comparisons = tournament
    shuffled = [*comparisons, *comparisons[:2]]
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    for function in (win_minus_loss, win_rate, matchup_count):
        assert function(shuffled, agent_ids) == function(comparisons, agent_ids)
    mirrored = [swapped(comparison) for comparison in comparisons]
    assert win_minus_loss(mirrored, agent_ids) == pytest.approx(win_minus_loss(comparisons, agent_ids))
    assert win_rate(mirrored, agent_ids) == pytest.approx(win_rate(comparisons, agent_ids))


@given(tournaments(invalid=False))
def test_a_full_tournament_is_zero_sum_and_bounded(tournament: tuple[list[int], list[Comparison]]) -> None:
    agent_ids, comparisons = tournament
    rewards = win_minus_loss(comparisons, agent_ids)
    assert math.fsum(rewards.values()) == pytest.approx(0.0, abs=1e-12)
    assert all(-1.0 <= reward <= 1.0 for reward in rewards.values())
    assert math.fsum(win_rate(comparisons, agent_ids).values()) == pytest.approx(len(agent_ids) / 2)
    hard = [compared(c.first, c.second, c.outcome) for c in comparisons]
    rates = win_rate(hard, agent_ids)
    assert win_minus_loss(hard, agent_ids) == pytest.approx({a: 2 * rates[a] - 1 for a in agent_ids})


@given(tournaments())
def test_an_invalid_comparison_counts_for_nobody(tournament: tuple[list[int], list[Comparison]]) -> None:
    agent_ids, comparisons = tournament
    valid = [comparison for comparison in comparisons if comparison.outcome is not INVALID]
    for function in (win_minus_loss, win_rate, matchup_count):
        assert function(comparisons, agent_ids) == function(valid, agent_ids)


def test_invalid_is_not_a_tie() -> None:
    won, tied, invalid = soft(0, 1, 1.0), compared(1, 0, TIE), compared(1, 0, INVALID)
    assert win_minus_loss([won, tied], [0, 1]) == {0: -0.5, 1: 0.5}
    assert win_minus_loss([won, invalid], [0, 1]) == {0: -1.0, 1: 1.0}


def test_an_agent_without_a_valid_matchup_has_no_reward() -> None:
    comparisons = [soft(0, 1, 1.0), compared(0, 2, INVALID), compared(1, 2, INVALID)]
    for function in (win_minus_loss, win_rate, matchup_count):
        with pytest.raises(NoValidComparisonsError, match=r"agents \[2\] have no valid comparison"):
            function(comparisons, [0, 1, 2])


@pytest.mark.parametrize(
    ("comparisons", "message"),
    [
        ([soft(0, 0, 1.0)], "two of the agents"),
        ([soft(0, 7, 1.0)], r"got \(0, 7\)"),
        ([soft(0, 1, 1.5)], "from -1 to 1; got 1.5"),
        ([soft(0, 1, 1.0), soft(0, 1, -1.0)], "compared twice with different results"),
        ([Comparison(first=0, second=1, outcome=INVALID, score=0.0)], "must have a score unless"),
        ([Comparison(first=0, second=1, outcome=TIE, score=None)], "must have a score unless"),
        ([Comparison(first=0, second=1, outcome=TIE, score=math.nan)], "from -1 to 1; got nan"),
    ],
)
def test_comparisons_that_make_no_sense_are_refused(comparisons: list[Comparison], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        win_minus_loss(comparisons, [0, 1])


# the judge's health


@given(tournaments())
def test_the_four_rates_share_all_comparisons(tournament: tuple[list[int], list[Comparison]]) -> None:
    _, comparisons = tournament
    metrics = judge_health(comparisons)
    names = ("preference_A_rate", "preference_B_rate", "tie_rate", "invalid_rate")
    assert math.fsum(metrics[f"judge/{name}"] for name in names) == pytest.approx(1.0)
    assert metrics["judge/invalid_rate"] == sum(c.outcome is INVALID for c in comparisons) / len(comparisons)
    assert all(0.0 <= value <= 1.0 for value in metrics.values())


@pytest.mark.parametrize(
    ("forth", "back", "position_bias", "disagreement"),
    [
        (A, A, 1, 1),
        (B, B, 1, 1),
        (A, B, 0, 0),
        (B, A, 0, 0),
        (TIE, TIE, 0, 0),
        (A, TIE, 0, 1),
        (TIE, B, 0, 1),
    ],
)
def test_position_bias_is_preferring_a_place_and_disagreement_any_difference(
    forth: Outcome, back: Outcome, position_bias: float, disagreement: float
) -> None:
    metrics = judge_health([compared(0, 1, forth), compared(1, 0, back)])
    assert (metrics["judge/position_bias"], metrics["judge/disagreement"]) == (position_bias, disagreement)


def test_position_bias_is_measured_on_pairs_judged_both_ways_only() -> None:
    one_way = [soft(0, 1, 1.0), soft(0, 2, 1.0), soft(1, 2, 1.0)]
    assert "judge/position_bias" not in judge_health(one_way)
    assert judge_health([*one_way, compared(1, 0, INVALID)]).keys() == judge_health(one_way).keys()
    assert judge_health([*one_way, soft(1, 0, 1.0)])["judge/position_bias"] == 1.0


def test_the_order_gap_is_the_bias_that_both_orders_share() -> None:
    metrics = judge_health([soft(0, 1, -0.6), soft(1, 0, -0.2)])
    assert metrics["judge/order_gap"] == pytest.approx(0.4)
    assert judge_health([soft(0, 1, -0.6), soft(1, 0, 0.6)])["judge/order_gap"] == 0.0


@pytest.mark.parametrize("pattern", [BOTH, ONE])
def test_cycles_are_counted_over_decided_triples(pattern: TournamentPattern) -> None:
    def judged(stronger: set[tuple[int, int]]) -> list[Comparison]:
        return [soft(i, j, -1.0 if (i, j) in stronger else 1.0) for i, j in pairs(range(3), pattern)]

    assert judge_health(judged({(0, 1), (1, 2), (2, 0)}))["judge/cyclic_triads"] == 1.0
    assert judge_health(judged({(0, 1), (1, 2), (0, 2)}))["judge/cyclic_triads"] == 0.0
    ties = [compared(i, j, TIE) for i, j in pairs(range(3), pattern)]
    assert "judge/cyclic_triads" not in judge_health(ties)


@given(st.permutations(range(4)))
def test_a_judge_with_a_ranking_has_no_cycles_and_no_bias(ranking: list[int]) -> None:
    place = {agent_id: index for index, agent_id in enumerate(ranking)}
    comparisons = [
        soft(i, j, -1.0 if place[i] < place[j] else 1.0) for i, j in itertools.permutations(range(4), 2)
    ]
    metrics = judge_health(comparisons)
    assert (
        metrics["judge/cyclic_triads"]
        == metrics["judge/position_bias"]
        == metrics["judge/disagreement"]
        == 0.0
    )
    rewards = win_minus_loss(comparisons, range(4))
    assert sorted(rewards, key=lambda agent_id: -rewards[agent_id]) == ranking


def test_no_comparisons_have_no_health() -> None:
    assert judge_health([]) == {}


def test_accuracy_is_over_pairs_of_a_right_and_a_wrong_solution() -> None:
    correct = {0: True, 1: False, 2: True}
    comparisons = [
        soft(0, 1, -1.0),
        soft(1, 0, -1.0),
        compared(1, 2, TIE),
        soft(0, 2, 1.0),
        compared(2, 1, INVALID),
    ]
    assert judge_accuracy(comparisons, correct) == {"judge/accuracy": 0.5, "judge/pair_accuracy": 0.5}
    assert judge_accuracy(comparisons, dict.fromkeys(range(3), True)) == {}


@given(st.floats(-0.4, 0.4), st.floats(-0.5, 0.5))
def test_a_preference_for_a_place_cancels_where_both_orders_were_asked(lean: float, bias: float) -> None:
    lean = round(lean, 3)
    both = [soft(0, 1, lean + bias), soft(1, 0, bias - lean)]
    found = judge_accuracy(both, {0: False, 1: True})
    if abs(bias) > abs(lean):
        assert found["judge/accuracy"] == 0.5, "the verdict turns with the order, and says nothing"
    assert lean == 0.0 or found["judge/pair_accuracy"] == float(lean > 0)
    rewards = win_minus_loss(both, [0, 1])
    assert lean == 0.0 or (rewards[1] > rewards[0]) == (lean > 0)
