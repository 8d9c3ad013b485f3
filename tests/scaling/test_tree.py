"""Counting by blocks gives what counting token by token gives."""

from hypothesis import given
from hypothesis import strategies as st

from viva.scaling.counts import (
    Block,
    Call,
    Cost,
    Prompts,
    Template,
    TrainedReply,
    count_step,
    rows_cost,
    tree_cost,
)

LENGTHS = {"a": 1, "b": 3, "c": 2, "d": 5}

paths_of_blocks = st.lists(
    st.lists(st.sampled_from(sorted(LENGTHS)), max_size=5).map(
        lambda keys: tuple(Block(key=key, tokens=LENGTHS[key]) for key in keys)
    ),
    max_size=6,
)


def spelt(path) -> tuple[str, ...]:
    """The path's tokens, one by one."""
    return tuple(f"{block.key}{index}" for block in path for index in range(int(block.tokens)))


@given(paths_of_blocks)
def test_a_tree_has_a_token_for_every_different_beginning(paths) -> None:
    beginnings = {spelt(path)[: end + 1] for path in paths for end in range(len(spelt(path)))}
    assert tree_cost(paths) == Cost(tokens=len(beginnings), pairs=sum(map(len, beginnings)))


@given(paths_of_blocks)
def test_rows_have_a_token_for_every_token(paths) -> None:
    lengths = [len(spelt(path)) for path in paths]
    assert rows_cost(paths) == Cost(tokens=sum(lengths), pairs=sum(n * (n + 1) / 2 for n in lengths))


@given(paths_of_blocks, paths_of_blocks)
def test_a_tree_saves_and_never_costs(paths, more) -> None:
    tree, rows = tree_cost(paths), rows_cost(paths)
    assert tree.tokens <= rows.tokens
    assert tree.pairs <= rows.pairs
    assert tree_cost([*paths, *paths]) == tree
    assert tree_cost([*reversed(paths)]) == tree
    assert tree.tokens <= tree_cost([*paths, *more]).tokens <= tree.tokens + rows_cost(more).tokens


def test_blocks_of_other_lengths_are_other_tokens() -> None:
    paths = [(Block(key="a", tokens=1),), (Block(key="a", tokens=2),)]
    assert tree_cost(paths) == rows_cost(paths)


def test_a_text_is_cut_at_markers_and_words_and_loses_nothing() -> None:
    prompts = Prompts(len, Template())
    words = prompts.marker("words", 7.0)
    text = f"one\ntwo {words} three\n{words}"
    keys = [block.key for block in prompts.blocks([("user", text)])][1:-1]
    assert keys == ["one\n", "two ", "words", " ", "three\n", "words"]
    assert prompts.tokens(text) == len("one\ntwo  three\n") + 14
    framed = prompts.blocks([("system", "S"), ("user", words)], prefill='{"')
    assert sum(block.tokens for block in framed) == 1 + 7 + 2 + 5 + 5 + 3


def test_a_step_counts_every_call_once_for_every_group() -> None:
    prompt = (Block(key="p", tokens=10.0),)
    reply = TrainedReply(context=prompt, tokens=4.0)
    calls = [
        Call(prompt=prompt, reply=4.0, trained=reply, scored=(reply,)),
        Call(prompt=prompt, reply=4.0, trained=reply),
        Call(prompt=prompt, reply=1.0, role="judge", wave=1),
    ]
    counts = count_step(calls, 3, checked=[reply])
    assert (counts.num_calls, counts.num_judge_calls, counts.sampled, counts.judged) == (6, 3, 24.0, 3.0)
    assert (counts.prompts.rows.tokens, counts.prompts.tree.tokens) == (60.0, 30.0)
    assert counts.prompts.saved == 0.5
    assert (counts.trained.rows.tokens, counts.trained.tree.tokens) == (2 * 3 * 13.0, 3 * (10.0 + 2 * 3.0))
    assert (counts.trained.targets, counts.num_datums) == (24.0, 6)
    assert counts.scored.rows.tokens == 4 * 13.0
    # a token that is decoded attends to its prompt, what was decoded before, and itself
    assert counts.decoded == Cost(tokens=27.0, pairs=3 * (2 * (4 * 10 + 10) + (10 + 1)))
