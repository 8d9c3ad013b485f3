from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.training.data import PromptDataset, PromptItem, PromptOrder, derive_seed, prompts_digest

parts = st.lists(st.integers(-(10**12), 10**12) | st.text(max_size=5), max_size=5)


def order(num_items=5, *, per_batch=3, num_groups=10, seed=0):
    items = tuple(PromptItem(question=str(n)) for n in range(num_items))
    return PromptOrder(items=items, seed=seed, groups_per_batch=per_batch, num_groups=num_groups)


@given(parts)
def test_a_seed_fits_in_31_bits(values):
    assert 0 <= derive_seed(*values) < 2**31


@given(parts, parts)
def test_different_places_have_different_seeds(a, b):
    if a != b:
        assert derive_seed(*a) != derive_seed(*b)


def test_seeds_are_the_same_on_every_machine():
    assert derive_seed(0, "rollouts", 3) == 687293803
    assert derive_seed("ab") != derive_seed("a", "b")
    assert derive_seed(1) != derive_seed("1")


def test_seeds_are_spread_evenly():
    buckets = Counter(derive_seed("x", index) >> 28 for index in range(8000))
    assert all(800 < buckets[bucket] < 1200 for bucket in range(8))


@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 40), st.integers(0, 5))
def test_every_pass_shows_every_prompt_once_and_nothing_is_dropped(num_items, per_batch, num_groups, seed):
    data = order(num_items, per_batch=per_batch, num_groups=num_groups, seed=seed)
    shown = [item.question for index in range(len(data)) for item in data.batch(index)]
    assert len(shown) == num_groups
    for start in range(0, num_groups - num_items + 1, num_items):
        assert sorted(shown[start : start + num_items]) == sorted(str(n) for n in range(num_items))


@given(st.integers(0, 3), st.integers(0, 3))
def test_a_batch_is_a_pure_function_of_its_index(seed, index):
    data = order(seed=seed)
    assert data.batch(index) == order(seed=seed).batch(index)
    data.batch(0)
    assert data.batch(index) == order(seed=seed).batch(index)


def test_passes_and_seeds_differ_in_their_order():
    first, second = order(20, per_batch=20, num_groups=40), order(20, per_batch=20, num_groups=40, seed=1)
    assert first.batch(0) != first.batch(1)
    assert first.batch(0) != second.batch(0)
    assert first.num_passes == 2.0


def test_the_last_batch_may_be_smaller():
    assert [len(order().batch(index)) for index in range(len(order()))] == [3, 3, 3, 1]


@pytest.mark.parametrize("index", [-1, 4])
def test_there_is_no_batch_outside(index):
    with pytest.raises(IndexError, match=f"from 0 to 3; got {index}"):
        order().batch(index)


@pytest.mark.parametrize("sizes", [{"num_items": 0}, {"per_batch": 0}, {"num_groups": 0}])
def test_an_empty_order_is_refused(sizes):
    with pytest.raises(ValueError, match="an order needs prompts and positive sizes"):
        order(**sizes)


def test_every_group_gets_its_own_seed_and_resuming_does_not_change_it():
    made = PromptDataset(order=order(), make_builder=lambda item, seed: (item, seed))
    pairs = [pair for index in range(len(made)) for pair in made.get_batch(index)]
    assert len({seed for _, seed in pairs}) == 10
    assert made.get_batch(2) == PromptDataset(order=order(), make_builder=made.make_builder).get_batch(2)


def test_the_fingerprint_sees_every_change_of_the_prompts():
    a, b = PromptItem(question="a", answer="1"), PromptItem(question="b")
    variants = [([a, b], []), ([b, a], []), ([a], [b]), ([PromptItem(question="a"), b], []), ([a, b, b], [])]
    assert len({prompts_digest(*lists) for lists in variants}) == len(variants)
    assert prompts_digest([a], [b]) == prompts_digest((a,), (b,))
