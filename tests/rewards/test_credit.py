"""Per-token advantages: what earns, what is masked, and where the baseline lies."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.rewards.credit import GroupCredit, SpanCredit, group_advantages, stream_advantages

WEIGHTS = {"r_sol": 1.0, "r_meta": 0.5, "r_diag": 2.0}
rewards = st.floats(-10, 10, allow_nan=False)


def span(**options):
    defaults = {"seat": 0, "transition": 0, "start": 0, "stop": 1, "stream": "r_sol", "round_index": 0}
    return SpanCredit(**(defaults | {"reward": 0.0} | options))


@st.composite
def groups(draw):
    """Spans in disjoint places of a ragged group, and the numbers of tokens."""
    num_tokens_G_K = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4))
    spans = []
    for seat, counts in enumerate(num_tokens_G_K):
        for transition, count in enumerate(counts):
            cuts = sorted(draw(st.sets(st.integers(0, count), max_size=5)))
            for start, stop in zip(cuts[::2], cuts[1::2], strict=False):
                spans.append(
                    span(
                        seat=seat,
                        transition=transition,
                        start=start,
                        stop=stop,
                        stream=draw(st.sampled_from(sorted(WEIGHTS))),
                        round_index=draw(st.integers(0, 2)),
                        reward=draw(rewards),
                    )
                )
    return GroupCredit(spans=tuple(draw(st.permutations(spans))), weights=WEIGHTS), num_tokens_G_K


def by_place(advantages_G, num_tokens_G_K):
    """All tokens' advantages, also of seats without a signal, by (seat, transition, token)."""
    return {
        (seat, transition, token): 0.0
        if advantages_G[seat] is None
        else advantages_G[seat][transition][token]
        for seat, counts in enumerate(num_tokens_G_K)
        for transition, count in enumerate(counts)
        for token in range(count)
    }


@given(groups())
def test_tokens_outside_all_spans_get_exactly_nothing(group):
    credit, num_tokens_G_K = group
    inside = {
        (one.seat, one.transition, token) for one in credit.spans for token in range(one.start, one.stop)
    }
    advantages = by_place(stream_advantages(credit, num_tokens_G_K), num_tokens_G_K)
    assert all(value == 0.0 for place, value in advantages.items() if place not in inside)


@given(groups())
def test_every_token_of_a_span_gets_its_reward_less_the_mean_of_its_stream_and_round(group):
    credit, num_tokens_G_K = group
    advantages = by_place(stream_advantages(credit, num_tokens_G_K), num_tokens_G_K)
    for one in credit.spans:
        peers = [
            other.reward
            for other in credit.spans
            if (other.stream, other.round_index) == (one.stream, one.round_index)
        ]
        expected = WEIGHTS[one.stream] * (one.reward - math.fsum(peers) / len(peers))
        for token in range(one.start, one.stop):
            assert advantages[one.seat, one.transition, token] == pytest.approx(expected, abs=1e-12)


@given(groups(), st.data())
def test_rewards_of_one_stream_and_round_touch_no_other(group, data):
    credit, num_tokens_G_K = group
    if not credit.spans:
        return
    moved = data.draw(st.sampled_from(credit.spans))
    key = (moved.stream, moved.round_index)
    changed = replace(
        credit, spans=tuple(replace(one, reward=7.0) if one is moved else one for one in credit.spans)
    )
    old = by_place(stream_advantages(credit, num_tokens_G_K), num_tokens_G_K)
    new = by_place(stream_advantages(changed, num_tokens_G_K), num_tokens_G_K)
    own = {
        (one.seat, one.transition, token)
        for one in credit.spans
        if (one.stream, one.round_index) == key
        for token in range(one.start, one.stop)
    }
    assert all(old[place] == new[place] for place in old if place not in own)


@given(groups(), st.randoms())
def test_the_order_of_the_spans_makes_no_difference(group, random):
    credit, num_tokens_G_K = group
    shuffled = list(credit.spans)
    random.shuffle(shuffled)
    other = GroupCredit(spans=tuple(shuffled), weights=WEIGHTS)
    assert stream_advantages(other, num_tokens_G_K) == stream_advantages(credit, num_tokens_G_K)


@given(rewards, st.integers(1, 5))
def test_equal_rewards_give_exact_zeros_and_no_signal(reward, count):
    spans = tuple(span(seat=seat, reward=reward) for seat in range(count))
    assert stream_advantages(GroupCredit(spans=spans, weights=WEIGHTS), [[1]] * count) == [None] * count


def test_the_baseline_counts_spans_and_not_tokens():
    spans = (span(stop=100, reward=1.0), span(seat=1, reward=0.0), span(seat=2, reward=0.5))
    advantages = stream_advantages(GroupCredit(spans=spans, weights=WEIGHTS), [[100], [2], [1]])
    assert advantages == [[[0.5] * 100], [[-0.5, 0.0]], None]


def test_a_stream_of_weight_zero_trains_nothing():
    spans = (span(reward=1.0), span(seat=1, reward=0.0))
    credit = GroupCredit(spans=spans, weights={"r_sol": 0.0})
    assert stream_advantages(credit, [[1], [1]]) == [None, None]


def test_a_lone_span_says_nothing():
    credit = GroupCredit(spans=(span(reward=3.0),), weights=WEIGHTS)
    assert stream_advantages(credit, [[2]]) == [None]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([span(stop=3), span(start=2, stop=4)], "at most one reward.*overlap"),
        ([span(stop=9), span(start=2, stop=3)], "at most one reward.*overlap"),
        ([span(reward=math.nan)], "rewards must be finite"),
        ([span(reward=math.inf)], "rewards must be finite"),
        ([span(start=1, stop=1)], "needs at least one token.*Leave it out"),
        ([span(start=-1)], "needs at least one token"),
        ([span(stream="r_other")], "'r_other'.*has no weight; streams with one: r_diag, r_meta, r_sol"),
    ],
)
def test_credit_that_cannot_be_given_is_refused(spans, message):
    with pytest.raises(ValueError, match=message):
        GroupCredit(spans=tuple(spans), weights=WEIGHTS)


def test_a_weight_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="weight of stream 'r_sol' must be a finite number; got nan"):
        GroupCredit(spans=(), weights={"r_sol": math.nan})


@pytest.mark.parametrize("outside", [{"seat": 2}, {"seat": -1}, {"transition": 1}, {"stop": 3}])
def test_a_span_outside_the_sampled_tokens_is_refused(outside):
    credit = GroupCredit(spans=(span(**outside),), weights=WEIGHTS)
    with pytest.raises(ValueError, match="must lie in"):
        stream_advantages(credit, [[2], [2]])


def test_spans_of_different_turns_may_have_the_same_place():
    spans = (span(stop=2, reward=1.0), span(transition=1, stop=2), span(seat=1, stop=2))
    advantages = stream_advantages(GroupCredit(spans=spans, weights=WEIGHTS), [[2, 2], [2]])
    assert advantages == [
        [pytest.approx([2 / 3] * 2), pytest.approx([-1 / 3] * 2)],
        [pytest.approx([-1 / 3] * 2)],
    ]


@given(st.lists(rewards, min_size=1, max_size=6))
def test_advantages_sum_to_zero_in_every_group(rewards_G):
    assert math.fsum(group_advantages(rewards_G)) == pytest.approx(0, abs=1e-10)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=6), st.integers(-50, 50))
def test_a_shift_of_all_rewards_changes_nothing(rewards_G, shift):
    shifted = group_advantages([reward + shift for reward in rewards_G])
    assert shifted == pytest.approx(group_advantages(rewards_G))


@given(st.lists(rewards, min_size=2, max_size=6), st.randoms())
def test_permuting_a_group_permutes_its_advantages(rewards_G, random):
    order = list(range(len(rewards_G)))
    random.shuffle(order)
    plain = group_advantages(rewards_G)
    assert group_advantages([rewards_G[index] for index in order]) == [plain[index] for index in order]


@given(rewards, st.integers(1, 9))
def test_a_group_of_equal_rewards_gets_exact_zeros(reward, size):
    assert group_advantages([reward] * size) == [0.0] * size


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(bad):
    with pytest.raises(ValueError, match="group must be finite"):
        group_advantages([1.0, bad])
