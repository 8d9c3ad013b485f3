"""Edges of the rewards of critique self-play that formulas alone do not show."""

import math
from dataclasses import replace

import pytest
from judge_weight import mended_by_labels

from viva.judging.ballots import Preference
from viva.judging.bradley_terry import Duel
from viva.judging.comparison import Comparison, Outcome
from viva.rewards.credit import GroupCredit, SpanCredit, stream_advantages, token_ranges, token_texts
from viva.rewards.review import (
    PRESETS,
    STREAMS,
    ReviewRules,
    ReviewVotes,
    duel_of,
    initial,
    revised,
    score_review,
)
from viva.testing import tiny_renderer

ROBUST, PAPER = PRESETS["robust"], PRESETS["paper"]
BYTES = tiny_renderer("qwen3_instruct")


def said(**changes):
    defaults = {"agents": (0, 1, 2), "initial": {}, "final": {}, "targets": {}}
    return ReviewVotes(**(defaults | changes))


@pytest.mark.parametrize("turned", [False, True])
def test_a_judges_comparison_of_a_solution_counts_for_all_with_the_same_words(turned):
    same = {revised(0): "a b", revised(1): " a  b "}

    def scored(agent):
        pair, share = (initial(2), revised(agent)), 0.1
        if turned:
            pair, share = (revised(agent), initial(2)), 0.9
        duel = Duel(first=pair[0], second=pair[1], share=share, weight=4.0)
        return score_review(said(duels=(duel,), texts=same), ROBUST)

    one, other = scored(0), scored(1)
    assert one == other
    assert one.final[0] == one.final[1]
    assert one.final[0].value > 0.6 > 0.4 > one.initial[2].value


def test_comparisons_of_others_and_of_equal_solutions_are_left_out():
    same = {revised(0): "a", initial(0): "a"}
    left_out = (
        Duel(first=revised(0), second=initial(0), share=1.0),
        Duel(first=revised(0), second=initial(9), share=1.0),
    )
    assert score_review(said(duels=left_out, texts=same), ROBUST) == score_review(said(texts=same), ROBUST)


def test_a_comparison_is_one_vote_and_was_shown_in_its_order():
    comparison = Comparison(first=0, second=1, outcome=Outcome.B, score=1.0)
    duel = duel_of(comparison, revised(2), initial(2))
    assert duel == Duel(first=revised(2), second=initial(2), share=0.0, weight=1.0, first_shown_first=True)


def test_a_sharper_prior_pulls_scores_to_the_middle():
    votes = said(final={0: [Preference(1, 2)]})
    weak, strong = (
        score_review(votes, replace(ROBUST, prior_precision=precision)).final for precision in (0.1, 10.0)
    )
    assert weak[1].value > strong[1].value > 0.5 > strong[2].value > weak[2].value
    assert weak[1].standard_error > strong[1].standard_error


def test_an_error_of_a_gain_in_separate_fits_is_that_of_two_independent_scores():
    votes = said(initial={0: [Preference(2, 1)]}, final={0: [Preference(1, 2)]})
    scores = score_review(votes, replace(PAPER, noise_floor=0.0))
    for agent in (1, 2):
        before, after = scores.initial[agent], scores.final[agent]
        gain = scores.gains[agent]
        assert gain.value == pytest.approx(after.value - before.value)
        assert gain.standard_error == pytest.approx(math.hypot(before.standard_error, after.standard_error))
        assert gain.measured
    assert scores.gains[1].paid == scores.gains[1].value > 0 > scores.gains[2].value
    assert scores.gains[2].paid == 0
    assert not scores.gains[0].measured


def test_a_total_is_the_weighted_sum_of_what_was_earned():
    votes = said(
        initial={0: [Preference(2, 1)]},
        final={0: [Preference(1, 2)], 2: [Preference(1, 0)]},
        targets={0: [1], 2: [1]},
    )
    weights = {"r_sol": 3.0, "r_meta": 5.0, "r_diag": 7.0}
    scores = score_review(votes, replace(PAPER, noise_floor=0.0, weights=weights))
    assert scores.r_diag[0] > 0
    for agent in votes.agents:
        expected = 3 * scores.r_sol[agent] + 5 * (scores.r_meta[agent] or 0.0) + 7 * scores.r_diag[agent]
        assert scores.totals[agent] == pytest.approx(expected)


def test_the_papers_weights_are_one_one_and_two_and_by_default_solutions_are_paid_alone():
    assert PRESETS["paper"].weights == STREAMS == {"r_sol": 1.0, "r_meta": 1.0, "r_diag": 2.0}
    assert ReviewRules().weights == {"r_sol": 1.0, "r_meta": 0.0, "r_diag": 0.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise_floor": math.inf}, "noise_floor must be a finite number of at least 0; got inf"),
        ({"prior_precision": math.inf}, "prior_precision must be a positive number; got inf"),
        ({"weights": STREAMS | {"r_sol": math.nan}}, "weights must give a finite number"),
        (
            {"weights": STREAMS | {"r_dig": 1.0, "zzz": 1.0}},
            r"unknown: 'r_dig'. Did you mean 'r_diag'\?; unknown: 'zzz'\.$",
        ),
    ],
)
def test_rules_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ReviewRules(**change)


def test_a_floor_of_zero_is_a_floor():
    assert ReviewRules(noise_floor=0.0).noise_floor == 0.0


def test_nothing_sampled_has_no_texts_and_no_range():
    assert token_texts(BYTES.tokenizer, []) == []
    assert token_ranges(BYTES, [], "", [(0, 0)]) == [None]


def test_ids_whose_pieces_do_not_add_up_are_written_one_by_one():
    class Odd:
        """Says something else of several ids than of each."""

        def decode(self, tokens):
            return "<many>" if len(tokens) > 1 else f"t{tokens[0]}" if tokens else ""

    assert token_texts(Odd(), [3, 4]) == ["t3", "t4"]


@pytest.mark.parametrize("bad", [(-1, 1), (2, 1), (0, 3)])
def test_ranges_that_are_none_are_refused(bad):
    tokens = BYTES.tokenizer.inner.encode("ab", add_special_tokens=False)
    with pytest.raises(ValueError, match="a range must lie in the text's 2 characters"):
        token_ranges(BYTES, tokens, "ab", [(0, 2), bad])


def span(**options):
    defaults = {"seat": 0, "transition": 0, "start": 0, "stop": 1, "stream": "r", "round_index": 0}
    return SpanCredit(**(defaults | {"reward": 0.0} | options))


def test_spans_that_touch_do_not_overlap_and_one_may_end_with_the_turn():
    spans = (span(stop=2, reward=1.0), span(start=2, stop=4, reward=0.0))
    credit = GroupCredit(spans=spans, weights={"r": 2.0})
    assert stream_advantages(credit, [[4]]) == [[[1.0, 1.0, -1.0, -1.0]]]


def test_rounds_and_streams_have_baselines_of_their_own():
    spans = (
        span(reward=1.0),
        span(seat=1, reward=0.0),
        span(start=1, stop=2, round_index=1, reward=9.0),
        span(seat=1, start=1, stop=2, stream="s", reward=5.0),
    )
    credit = GroupCredit(spans=spans, weights={"r": 1.0, "s": 1.0})
    assert {key: len(value) for key, value in credit.streams().items()} == {
        ("r", 0): 2,
        ("r", 1): 1,
        ("s", 0): 1,
    }
    assert stream_advantages(credit, [[2], [2]]) == [[[0.5, 0.0]], [[-0.5, 0.0]]]


def test_a_stream_without_a_weight_is_named_even_where_there_are_none():
    with pytest.raises(ValueError, match=r"has no weight; streams with one: none$"):
        GroupCredit(spans=(span(),), weights={})


def test_critics_are_paid_by_label_votes_from_the_shares_on_that_the_page_gives():
    shares = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    paying = {
        number: [share for share in shares if mended_by_labels(number, share)[2]] for number in (3, 4, 6)
    }
    assert paying == {3: [0.9, 1.0], 4: [0.8, 0.9, 1.0], 6: [0.7, 0.8, 0.9, 1.0]}
    gain, error, paid = mended_by_labels(3, 0.8)
    assert (gain, error, paid) == (pytest.approx(0.18, abs=0.005), pytest.approx(0.22, abs=0.005), 0.0)
