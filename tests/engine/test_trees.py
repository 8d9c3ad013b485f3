from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.engine import trees
from viva.engine.trees import PackedTree, pack_tree, shared_lengths

sequences_strategy = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12
).map(sorted)
prices = st.sampled_from([0.0, 10.0, 1e9])


def pack(sequences: Sequence[Sequence[int]], price: float = 0.0) -> PackedTree:
    return pack_tree([np.array(sequence, dtype=np.int64) for sequence in sequences], price)


def check(tree: PackedTree, sequences: Sequence[Sequence[int]]) -> None:
    """Every token sees its own sequence up to itself and nothing else."""
    prefixes = {tuple(sequence[:size]) for sequence in sequences for size in range(1, len(sequence) + 1)}
    assert len(tree.tokens) == len(prefixes)
    seen: dict[int, list[int]] = {}
    done = 0
    for cell in tree.cells:
        assert cell.queries.start == done
        done = cell.queries.stop
        keys = np.concatenate([np.arange(part.start, part.stop) for part in cell.keys])
        assert keys[-len(cell.visible) :].tolist() == list(range(cell.queries.start, cell.queries.stop))
        for query, row in zip(range(cell.queries.start, cell.queries.stop), cell.visible, strict=True):
            seen[query] = keys[row].tolist()
    assert done == len(tree.tokens)
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert tree.tokens[path].tolist() == list(sequence)
        assert tree.depths[path].tolist() == list(range(len(sequence)))
        for depth, place in enumerate(path.tolist()):
            assert seen[place] == path[: depth + 1].tolist()


@given(sequences_strategy, prices)
def test_every_token_stands_once_and_sees_its_own_past(sequences: list[list[int]], price: float) -> None:
    check(pack(sequences, price), sequences)


def test_long_sequences_are_cut_into_cells_that_see_everything_before_them() -> None:
    prefix = [number % 7 for number in range(400)]
    sequences = sorted([prefix[:300] + [9] * 150, [*prefix[:130], 8], prefix, prefix[:20]])
    for price in (0.0, 1e3, 1e9):
        check(pack(sequences, price), sequences)


def test_cells_are_joined_where_calls_are_dear_and_apart_where_entries_are() -> None:
    sequences = [[0] * 30 + [number] * 4 for number in range(8)]
    by_entries, by_calls = pack(sequences, 0.0), pack(sequences, 1e9)
    assert len(by_entries.cells) == 8
    assert len(by_calls.cells) == 1
    assert sum(cell.visible.size for cell in by_entries.cells) < by_calls.cells[0].visible.size


def test_no_cell_of_several_tokens_holds_more_entries_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = list(range(300))
    sequences = sorted(prefix[:size] + [1000] * 9 for size in range(5, 300, 20))
    monkeypatch.setattr(trees, "_MAX_ENTRIES", 2000)
    tree = pack(sequences, 1e9)
    check(tree, sequences)
    assert max(cell.visible.size for cell in tree.cells) <= 2000


@given(sequences_strategy)
def test_neighbours_share_as_much_as_any_earlier_sequence(sequences: list[list[int]]) -> None:
    arrays = [np.array(sequence) for sequence in sequences]
    for index, shared in enumerate(shared_lengths(arrays)):
        best = max((shared_lengths([earlier, arrays[index]])[1] for earlier in arrays[:index]), default=0)
        assert shared == best
