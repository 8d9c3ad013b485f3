import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.rewards.streams import group_advantages

rewards = st.floats(-100, 100, allow_nan=False)
groups = st.lists(st.lists(rewards, min_size=1, max_size=6), max_size=4)


@given(groups)
def test_advantages_sum_to_zero_in_every_group(rewards_P_G):
    for advantages_G in group_advantages(rewards_P_G):
        assert math.fsum(advantages_G) == pytest.approx(0, abs=1e-10)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=6), st.integers(-50, 50))
def test_a_shift_of_all_rewards_changes_nothing(rewards_G, shift):
    shifted = group_advantages([[reward + shift for reward in rewards_G]])
    assert shifted[0] == pytest.approx(group_advantages([rewards_G])[0])


@given(st.lists(rewards, min_size=2, max_size=6), st.randoms())
def test_permuting_a_group_permutes_its_advantages(rewards_G, random):
    order = list(range(len(rewards_G)))
    random.shuffle(order)
    permuted = group_advantages([[rewards_G[index] for index in order]])[0]
    plain = group_advantages([rewards_G])[0]
    assert permuted == [plain[index] for index in order]


@given(rewards, st.integers(1, 9))
def test_equal_rewards_give_exact_zeros(reward, size):
    assert group_advantages([[reward] * size]) == [[0.0] * size]


@given(groups)
def test_groups_do_not_touch_each_other(rewards_P_G):
    assert group_advantages(rewards_P_G) == [group_advantages([rewards_G])[0] for rewards_G in rewards_P_G]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(bad):
    with pytest.raises(ValueError, match="group 1 must be finite"):
        group_advantages([[0.0], [1.0, bad]])
