"""A last layer that computes what is read alone equals one that computes everything."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_tree_training import DEAR_TOKENS, assert_alike, evaluate
from tiny_engine import FAMILIES, ints, supervised, train

from viva.engine import LocalServiceClient, policy
from viva.engine.layers import LastLayer, confine_last_layer
from viva.engine.model import decoder_layers, load_base_model, structure_copy
from viva.engine.policy import Policy
from viva.engine.trees import TreeStep, pack_tree

CPU = torch.device("cpu")
PROMPT, REPLIES = 140, 3
"""A prompt has a cell of its own, in which nothing is read."""


def group() -> list[tinker.Datum]:
    """Replies behind one prompt, whose targets a mask hides; one reply is hidden half."""
    generator = np.random.default_rng(5)
    prompt = generator.integers(0, 250, PROMPT).tolist()
    data: list[tinker.Datum] = []
    for number in range(REPLIES):
        reply = generator.integers(0, 250, 6 + number).tolist()
        mask = np.ones(PROMPT + len(reply) - 1, np.float32)
        mask[: PROMPT - 1 + 3 * (number == 1)] = 0
        inputs: dict[str, Any] = {
            "target_tokens": [*prompt, *reply][1:],
            "weights": generator.normal(size=len(mask)).tolist(),
            "mask": mask,
        }
        data.append(tinker.Datum(model_input=ints([*prompt, *reply][:-1]), loss_fn_inputs=inputs))
    return data


def make_policy(service: LocalServiceClient, folder: str, rank: int) -> Policy:
    client = service.create_lora_training_client(folder, rank=rank, seed=0)
    train(client, [list(range(1, 30))], steps=1, learning_rate=0.01 if rank else 0.001)
    client._policy._costs = DEAR_TOKENS
    return client._policy


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("trees", [False, True])
def test_losses_and_gradients_are_those_of_whole_layers(
    family: str,
    rank: int,
    trees: bool,
    service: LocalServiceClient,
    model_dir: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    confined = make_policy(service, model_dir(family), rank)
    assert confined._is_confined == (not family.startswith("gemma"))
    with monkeypatch.context() as context:
        context.setattr(policy, "confine_last_layer", lambda module: False)
        whole = make_policy(service, model_dir(family), rank)
    ours, theirs = (
        evaluate(each, group(), "cross_entropy", trees=trees and each.base.takes_trees)
        for each in (confined, whole)
    )
    assert theirs[1].norm() > 0
    assert_alike(ours, theirs, 1e-5)
    assert list(confined._parameters) == list(whole._parameters)


@pytest.mark.parametrize("trees", [False, True])
def test_the_last_layer_computes_what_is_read_alone(
    trees: bool, service: LocalServiceClient, model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = make_policy(service, model_dir("qwen3"), 4)
    rows: list[int] = []
    for layer in decoder_layers(trained._module):
        layer.mlp.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[:-1].numel()))
    cells: list[list[int]] = []
    make = TreeStep.__init__

    def spy(step: TreeStep, *given: Any) -> None:
        make(step, *given)
        cells.append([step.cells[index].queries.start for index in step.read_cells])

    monkeypatch.setattr(TreeStep, "__init__", spy)
    evaluate(trained, group(), "cross_entropy", trees=trees)
    replies = sum(6 + number for number in range(REPLIES)) - 3
    shared = (
        REPLIES - 2 if trees else 0
    )  # the first reply tokens are predicted at one place of the tree, one is hidden
    assert rows[-1] == replies - shared
    assert rows[0] > PROMPT
    assert all(0 not in starts for starts in cells)
    assert len(cells) == trees


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9), st.data())
def test_cells_that_are_read(texts: list[list[int]], data: st.DataObject) -> None:
    tree = pack_tree([np.array(text) for text in sorted(texts)], call_entries=data.draw(st.integers(0, 20)))
    read = sorted(data.draw(st.sets(st.integers(0, len(tree.tokens) - 1))))
    step = TreeStep(tree, CPU, np.array(read, dtype=np.int64))
    expected = [
        index for index, cell in enumerate(tree.cells) if {*range(len(tree.tokens))[cell.queries]} & {*read}
    ]
    assert list(step.read_cells) == expected
    assert list(TreeStep(tree, CPU).read_cells) == list(range(len(tree.cells)))


def test_a_layer_that_somebody_changed_is_left_alone(model_dir: Callable[[str], str]) -> None:
    module = structure_copy(load_base_model(model_dir("llama"), CPU, torch.float32).module)
    last = decoder_layers(module)[-1]

    class LlamaDecoderLayer(type(last)):
        """Of somebody else, who may have changed anything."""

    kind, last.__class__ = last.__class__, LlamaDecoderLayer
    assert not confine_last_layer(module)
    assert decoder_layers(module)[-1] is last
    last.__class__ = kind
    names = [name for name, _ in module.named_parameters()]
    assert confine_last_layer(module)
    assert isinstance(decoder_layers(module)[-1], LastLayer)
    assert [name for name, _ in module.named_parameters()] == names


def test_where_nothing_is_read_nothing_is_computed(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    client = service.create_lora_training_client(model_dir("llama"), rank=2, seed=0)
    datum = supervised(list(range(9)))
    inputs: dict[str, Any] = {**datum.loss_fn_inputs, "mask": np.zeros(8, np.float32)}
    hidden = tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)
    assert client.forward([hidden], "cross_entropy").result().metrics["tree_token_ratio"] == 0
    assert client.forward([datum], "cross_entropy").result().metrics["tree_token_ratio"] == 1
