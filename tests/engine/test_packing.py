"""Which examples are computed together, and what that costs."""

import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import make_config, with_kernels

from viva.engine.packing import CostModel, DatumArrays, MicroBatch, _runs, plan_batches
from viva.engine.trees import pack_tree, shared_lengths

DEAR_TOKENS = CostModel(token=1.0, entry=1e-9, tree_entry=2e-9, call=0.0)
DEAR_CALLS = CostModel(token=1.0, entry=1.0, tree_entry=2.0, call=1e12)

contents = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=10), st.booleans(), st.sampled_from([(), (2,)])
    ),
    min_size=1,
    max_size=14,
)


def example(tokens: Sequence[int], active: bool = True, candidates: tuple[int, ...] = ()) -> DatumArrays:
    shape = (len(tokens), *candidates)
    return DatumArrays(
        tokens=np.array(tokens, dtype=np.int64),
        targets=np.zeros(shape, dtype=np.int64),
        inputs={"weights": np.full(shape, active, dtype=np.float32)},
        active=np.full(shape, active),
        wanted=np.ones(shape, dtype=bool),
    )


def look(batches: Sequence[MicroBatch], examples: Sequence[DatumArrays]) -> list[tuple[object, ...]]:
    """The batches without the numbers that examples have in the caller's list."""
    return [
        (
            batch.tokens.tolist(),
            [place.tolist() for place in batch.places],
            [examples[index].active.tolist() for index in batch.indices],
        )
        for batch in batches
    ]


@given(contents, st.integers(1, 40), st.sampled_from([DEAR_TOKENS, DEAR_CALLS]), st.booleans())
def test_batches_hold_every_example_once_at_its_places_within_the_budget(
    given_contents: list[tuple[list[int], bool, tuple[int, ...]]], budget: int, costs: CostModel, trees: bool
) -> None:
    examples = [example(*content) for content in given_contents]
    batches = plan_batches(examples, costs, budget, trees=trees)
    assert sorted(index for batch in batches for index in batch.indices) == list(range(len(examples)))
    for batch in batches:
        assert len({bool(examples[index].active.any()) for index in batch.indices}) == 1
        assert batch.tokens.size <= budget or len(batch.indices) == 1
        assert trees or batch.tree is None
        for index, places in zip(batch.indices, batch.places, strict=True):
            assert batch.tokens.reshape(-1)[places].tolist() == examples[index].tokens.tolist()


@given(contents, st.randoms(use_true_random=False), st.integers(1, 40))
def test_the_order_of_the_examples_changes_no_batch(
    given_contents: list[tuple[list[int], bool, tuple[int, ...]]], random: Random, budget: int
) -> None:
    examples = [example(*content) for content in given_contents]
    shuffled = list(examples)
    random.shuffle(shuffled)
    plans = [look(plan_batches(each, DEAR_TOKENS, budget, trees=True), each) for each in (examples, shuffled)]
    assert plans[0] == plans[1]


def test_a_shared_beginning_is_computed_once_and_again_in_every_part_of_a_tree_that_was_cut() -> None:
    examples = [example([0] * 20 + [number] * 5) for number in range(1, 7)]
    (whole,) = plan_batches(examples, DEAR_TOKENS, 1000, trees=True)
    assert whole.tree is not None
    assert whole.tokens.shape == (1, 20 + 6 * 5)
    halves = plan_batches(examples, DEAR_TOKENS, 35, trees=True)
    assert [batch.tokens.shape for batch in halves] == [(1, 35), (1, 35)]


def test_trees_of_several_prompts_are_divided_between_them_where_that_is_enough() -> None:
    groups = [[example([group] * 40 + [number] * 5) for number in range(10, 16)] for group in range(4)]
    examples = [each for group in groups for each in group]
    one = 40 + 6 * 5
    for enough, sizes in ((1000, [4 * one]), (3 * one, [3 * one, one]), (one, [one] * 4), (1, [one] * 4)):
        batches = plan_batches(examples, DEAR_TOKENS, 1000, trees=True, enough_tokens=enough)
        assert [batch.tokens.size for batch in batches] == sizes
        assert sorted(index for batch in batches for index in batch.indices) == list(range(24))


def test_a_few_tokens_that_all_prompts_share_are_computed_again_so_that_batches_are_small() -> None:
    examples = [
        example([9] * 2 + [group] * 40 + [number] * 5) for group in range(4) for number in range(10, 16)
    ]
    (whole,) = plan_batches(examples, DEAR_TOKENS, 1000, trees=True, enough_tokens=1000)
    halves = plan_batches(examples, DEAR_TOKENS, 1000, trees=True, enough_tokens=160)
    assert [batch.tokens.size for batch in halves] == [whole.tokens.size // 2 + 1] * 2


def test_a_conversation_is_not_cut_where_another_begins_nearby() -> None:
    """Two transcripts that grow by 10 tokens a turn; a budget of one and a half would split the second."""
    talks = [
        example([talk] * 5 + list(range(10, 10 + 10 * turn)) + [200 + turn] * 5)
        for talk in (1, 2)
        for turn in range(1, 7)
    ]
    batches = plan_batches(talks, DEAR_TOKENS, 140, trees=True)
    assert [batch.tokens.size for batch in batches] == [5 + 60 + 6 * 5] * 2


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=9), st.integers(1, 20)
)
def test_trees_are_cut_so_that_the_fewest_tokens_are_computed(texts: list[list[int]], budget: int) -> None:
    examples = [example(text, active=text[0] < 2) for text in texts]
    order = sorted(range(len(texts)), key=lambda index: (texts[index][0] == 2, texts[index]))
    shared = shared_lengths([examples[index].tokens for index in order])

    def cost(run: Sequence[int]) -> int | None:
        size = sum(len(texts[order[place]]) - (shared[place] if place > run[0] else 0) for place in run)
        kinds = {texts[order[place]][0] < 2 for place in run}
        return size if len(run) == 1 or (size <= budget and len(kinds) == 1) else None

    cuts: list[tuple[int, int]] = []
    for marks in itertools.product((False, True), repeat=len(texts) - 1):
        bounds = [0, *(place for place, mark in enumerate(marks, start=1) if mark), len(texts)]
        costs = [cost(range(first, stop)) for first, stop in itertools.pairwise(bounds)]
        if None not in costs:
            cuts.append((sum(size for size in costs if size is not None), len(costs)))
    runs = _runs(examples, order, budget)
    assert [index for run in runs for index in run] == order
    starts = list(itertools.accumulate(map(len, runs), initial=0))
    found = [cost(range(first, stop)) for first, stop in itertools.pairwise(starts)]
    assert (sum(size for size in found if size is not None), len(found)) == min(cuts)
    assert None not in found


def test_the_cheaper_of_tree_and_rows_is_chosen() -> None:
    alike = [example([0] * 20 + [number] * 5) for number in range(1, 7)]
    unlike = [example([number] * 25) for number in range(6)]
    ragged = [example([number] * (5 + 20 * (number == 0))) for number in range(6)]
    assert plan_batches(alike, DEAR_CALLS, 1000, trees=True)[0].tree is None
    assert plan_batches(unlike, DEAR_TOKENS, 1000, trees=True)[0].tree is None
    # without sharing there is still no padding in a tree
    assert plan_batches(ragged, DEAR_TOKENS, 1000, trees=True)[0].tokens.size == 50
    assert plan_batches(alike[:1], DEAR_TOKENS, 1000, trees=True)[0].tree is None


PRICES = CostModel(token=1.0, entry=10.0, tree_entry=30.0, call=1000.0)


def model_of(family: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_config(make_config(family))


@with_kernels
def test_a_models_costs_are_its_matrices_its_heads_and_its_layers() -> None:
    costs = CostModel.of(model_of("llama"))
    # 2 layers of 4 heads of 8 over 2 keys, an MLP of 48, all on 32 channels; 260 rows in the output layer
    attention = 32 * 4 * 8 * 2 + 32 * 2 * 8 * 2
    assert costs.token == 2 * (attention + 3 * 32 * 48) + 260 * 32
    assert costs.entry == 2 * 2 * 4 * 8
    assert costs.tree_entry == costs.entry / 2
    assert costs.call == 2 * 2e6


def test_entries_of_trees_cost_more_than_those_of_rows_where_no_kernels_are_for_them() -> None:
    for costs in (CostModel.of(model_of("gemma2")), CostModel.of(model_of("llama").double())):
        assert costs.tree_entry == 2 * costs.entry


def test_a_head_has_its_own_size_or_its_share_of_the_channels() -> None:
    model = model_of("llama")
    model.config.head_dim = 20
    assert CostModel.of(model).entry == 2 * 2 * 4 * 20
    model.config.head_dim = None
    assert CostModel.of(model).entry == 2 * 2 * 4 * (32 // 4)
    del model.config.head_dim
    assert CostModel.of(model).entry == 2 * 2 * 4 * (32 // 4)


def test_a_product_costs_more_where_it_is_started_from_afar() -> None:
    model = model_of("llama")
    near = CostModel.of(model).call
    with torch.device("meta"):
        assert CostModel.of(model_of("llama")).call == pytest.approx(500 * near)


def test_rows_cost_their_tokens_the_lower_triangle_of_their_entries_and_one_product() -> None:
    assert PRICES.rows(3, 4) == 3 * 4 + 10 * 3 * (4 * 5 / 2) + 1000
    assert PRICES.rows(1, 1) == 1 + 10 + 1000


def test_a_tree_costs_its_tokens_its_cells_entries_and_a_product_each() -> None:
    arrays = [np.array([0, 0, 0, number], dtype=np.int64) for number in range(3)]
    for price in (0.0, 1e9):
        tree = pack_tree(arrays, price)
        entries = sum(cell.visible.size for cell in tree.cells)
        assert PRICES.tree(tree) == len(tree.tokens) + 30 * entries + 1000 * len(tree.cells)


def test_the_largest_batches_come_first_and_those_without_a_gradient_last() -> None:
    examples = [
        example([1] * 2),
        example([2] * 9, active=False),
        example([3] * 7),
        example([4] * 5, active=False),
    ]
    for trees in (False, True):
        batches = plan_batches(examples, PRICES, 8, trees=trees)
        assert [batch.indices for batch in batches] == [(2,), (0,), (1,), (3,)]
