"""The price list by which examples are packed: counted by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import make_config, with_kernels

from viva.engine.packing import CostModel, Example, plan_batches
from viva.engine.trees import pack_tree

PRICES = CostModel(token=1.0, entry=10.0, tree_entry=30.0, call=1000.0)


def model_of(family: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_config(make_config(family))


def example(tokens: list[int], active: bool = True) -> Example:
    return Example(
        tokens=np.array(tokens, dtype=np.int64),
        targets=np.zeros(len(tokens), dtype=np.int64),
        inputs={"weights": np.full(len(tokens), active, dtype=np.float32)},
        active=np.full(len(tokens), active),
        wanted=np.ones(len(tokens), dtype=bool),
    )


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
    assert PRICES.call_entries == 1000 / 30


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
