"""Training by prefix trees equals training datum by datum."""

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tiny_engine import FAMILIES, ints, make_tokenizer, params, supervised, train
from tree_results import DEAR_TOKENS, assert_alike, evaluate

from viva.engine import EngineLimits, LocalServiceClient, LocalTrainingClient, model
from viva.engine.attention import UnsupportedAttentionError
from viva.engine.losses import LOSSES
from viva.engine.packing import CostModel
from viva.engine.policy import LossResult
from viva.engine.trees import TreeStep

DEAR_CALLS = CostModel(token=1.0, entry=1e-9, tree_entry=2e-9, call=0.1)
NUM_TREES = 1000
BATCHES = 10


def random_data(generator: np.random.Generator, loss: str, vocab: int) -> list[tinker.Datum]:
    """Datums that fork from one another anywhere, with duplicates, beginnings of others and strangers."""
    texts: list[list[int]] = []
    for _ in range(int(generator.integers(1, 9))):
        fresh = generator.integers(0, vocab, int(generator.integers(2, 14))).tolist()
        kind = generator.integers(0, 5) if texts else 0
        source = texts[int(generator.integers(len(texts)))] if texts else []
        cut = int(generator.integers(2, len(source) + 1)) if texts else 0
        texts.append({0: fresh, 3: source, 4: source[:cut]}.get(int(kind), source[:cut] + fresh))
    return [_random_datum(generator, loss, text) for text in texts]


def random_trees(batch: int) -> Iterator[tuple[str, list[tinker.Datum], CostModel]]:
    """One batch of the thousand: a loss, its data, and costs that decide which cells the tree has."""
    generator = np.random.default_rng(batch)
    for number in range(NUM_TREES // BATCHES):
        loss = sorted(LOSSES)[number % len(LOSSES)]
        data = random_data(generator, loss, vocab=int(generator.integers(2, 250)))
        yield loss, data, (DEAR_TOKENS, DEAR_CALLS)[int(generator.integers(2))]


def _random_datum(generator: np.random.Generator, loss: str, text: list[int]) -> tinker.Datum:
    num = len(text) - 1
    values = generator.normal(size=num)
    values[generator.random(num) < generator.choice([0.0, 0.5, 1.0], p=[0.3, 0.6, 0.1])] = 0.0
    inputs: dict[str, Any] = {"target_tokens": text[1:]}
    if loss == "cross_entropy":
        inputs["weights"] = values.tolist()
    else:
        inputs["advantages"] = values.tolist()
        inputs["logprobs"] = (-3 + generator.normal(size=num)).tolist()
    if loss != "dro":  # its slopes are so large that what masks leave of them may cancel to nothing
        kept = generator.spawn(1)[0].random(num) < generator.spawn(1)[0].choice([0.7, 1.0])
        inputs["mask"] = kept.astype(np.float32)
    return tinker.Datum(model_input=ints(text[:-1]), loss_fn_inputs=inputs)


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One layer, 16 wide."""
    import transformers

    folder = tmp_path_factory.mktemp("small")
    config = transformers.Qwen3Config(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=260,
        max_position_embeddings=256,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=256,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def small_client(small_dir: str) -> LocalTrainingClient:
    """A trained adapter on it, with trees of few tokens in a batch."""
    service = LocalServiceClient(device="cpu", limits=EngineLimits(training_tokens=48))
    client = service.create_lora_training_client(small_dir, rank=2, seed=0)
    train(client, [list(b"fox and hen"), list(b"hen")])
    return client


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_thousand_random_trees_have_the_losses_and_gradients_of_their_rows(
    small_client: LocalTrainingClient, batch: int
) -> None:
    policy = small_client._policy
    for loss, data, policy._costs in random_trees(batch):
        assert_alike(
            evaluate(policy, data, loss, trees=True), evaluate(policy, data, loss, trees=False), 1e-5
        )


def test_without_kernels_trees_have_the_losses_and_gradients_of_their_rows(
    small_client: LocalTrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("viva.engine.trees.can_compile", lambda query: False)
    policy = small_client._policy
    for loss, data, policy._costs in random_trees(0):
        assert_alike(
            evaluate(policy, data, loss, trees=True), evaluate(policy, data, loss, trees=False), 1e-5
        )


def test_the_random_trees_have_duplicates_beginnings_single_tokens_and_nothing_to_learn() -> None:
    found: Counter[str] = Counter()
    for _, data, _ in itertools.chain.from_iterable(map(random_trees, range(BATCHES))):
        texts = [datum.model_input.to_ints() for datum in data]
        found["duplicates"] += len({tuple(text) for text in texts}) < len(texts)
        found["beginnings"] += any(
            len(short) < len(long) and long[: len(short)] == short for short in texts for long in texts
        )
        found["strangers"] += len({text[0] for text in texts}) == len(texts) > 1
        found["single tokens"] += min(map(len, texts)) == 1
        values = [
            datum.loss_fn_inputs[key].to_numpy()
            for datum in data
            for key in ("weights", "advantages")
            if key in datum.loss_fn_inputs
        ]
        found["one datum without gradient"] += any(not value.any() for value in values)
        found["no datum with gradient"] += not any(value.any() for value in values)
    assert len(found) == 6
    assert min(found.values()) >= 10


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [0, 4])
def test_every_family_takes_trees_also_beyond_its_window(
    family: str, rank: int, service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    client = service.create_lora_training_client(model_dir(family), rank=rank, seed=0)
    policy = client._policy
    assert policy.base.takes_trees
    text = list(b"The answer is 42, because six times seven is.")
    train(client, [text], steps=1, learning_rate=0.01 if rank else 0.001)
    policy._costs = DEAR_TOKENS
    data = [supervised(text[:cut] + list(b" No, look: 6 * 7.")[cut % 5 :]) for cut in (9, 25, 25, 40)]
    ours, theirs = (evaluate(policy, data, "cross_entropy", trees=trees) for trees in (True, False))
    assert ours[0].num_computed < 0.6 * theirs[0].num_computed
    assert_alike(ours, theirs, 2e-5)


def test_targets_that_are_the_same_count_as_often_as_they_are_given(
    small_client: LocalTrainingClient,
) -> None:
    policy = small_client._policy
    policy._costs = DEAR_TOKENS
    once, thrice = [supervised([1, 2, 3, 4])], [supervised([1, 2, 3, 4])] * 3
    single = evaluate(policy, once, "cross_entropy", trees=True)
    triple = evaluate(policy, thrice, "cross_entropy", trees=True)
    assert (triple[0].num_computed, single[0].num_computed) == (3, 3)
    assert (triple[1] - 3 * single[1]).norm() <= 1e-5 * triple[1].norm()
    for losses in triple[0].losses:
        np.testing.assert_allclose(losses, single[0].losses[0], rtol=1e-5)


def test_the_order_of_the_data_decides_nothing_but_the_order_of_the_outputs(
    small_client: LocalTrainingClient,
) -> None:
    client, generator = small_client, np.random.default_rng(1)
    for loss in sorted(LOSSES):
        data = random_data(generator, loss, vocab=4) + random_data(generator, loss, vocab=4)
        for trees in (True, False):
            client._policy._costs = DEAR_TOKENS
            client._policy.base = replace(client._policy.base, takes_trees=trees)
            order = generator.permutation(len(data)).tolist()
            outputs, found = [], []
            for each in (data, data, [data[index] for index in order]):
                outputs.append(client.forward_backward(each, loss).result())
                found.append({n: p.grad.clone() for n, p in client._policy._parameters.items()})
                client._policy._clear_gradients()
            assert outputs[0].metrics == outputs[1].metrics == outputs[2].metrics
            rows = [[row["logprobs"].tolist() for row in output.loss_fn_outputs] for output in outputs]
            assert str(rows[0]) == str(rows[1])  # masked ones are not a number, which equals nothing
            assert str(rows[2]) == str([rows[0][index] for index in order])
            for other in found[1:]:
                assert all(torch.equal(found[0][name], other[name]) for name in other)


def test_several_candidates_per_target_are_counted_in_a_tree(small_client: LocalTrainingClient) -> None:
    generator = np.random.default_rng(2)
    policy = small_client._policy
    policy._costs = DEAR_TOKENS
    data: list[tinker.Datum] = []
    for ending in ([5, 6], [5, 7], [8]):
        tokens = [1, 2, 3, 4, *ending]
        shape = (len(tokens), 3)
        weights = generator.normal(size=shape).astype(np.float32)
        weights[generator.random(shape) < 0.3] = 0
        data.append(
            tinker.Datum(
                model_input=ints(tokens),
                loss_fn_inputs={
                    "target_tokens": tinker.TensorData.from_numpy(generator.integers(0, 5, shape)),
                    "weights": tinker.TensorData.from_numpy(weights),
                },
            )
        )
    data.append(supervised([1, 2, 3, 9, 9]))
    assert_alike(
        evaluate(policy, data, "cross_entropy", trees=True),
        evaluate(policy, data, "cross_entropy", trees=False),
        1e-5,
    )


def test_a_loss_of_your_own_has_its_gradient_in_trees(small_client: LocalTrainingClient) -> None:
    client, policy = small_client, small_client._policy
    policy._costs = DEAR_TOKENS
    data = [supervised([1, 2, 3, number, 9]) for number in range(5)]
    found = []
    for trees in (True, False):
        policy.base = replace(policy.base, takes_trees=trees)
        output = client.forward_backward_custom(
            data, lambda _, rows: (-sum((row**2).sum() for row in rows), {})
        ).result()
        found.append(torch.cat([p.grad.flatten() for p in policy._parameters.values()]))
        policy._clear_gradients()
        assert output.metrics["tree_token_ratio"] == (0.4 if trees else 1.0)
    assert (found[0] - found[1]).norm() <= 1e-5 * found[1].norm()


def test_a_bfloat16_model_has_the_gradients_of_a_float32_one_in_trees_and_rows(small_dir: str) -> None:
    data = [supervised([*range(1, 20), number, number + 1]) for number in range(5)]
    found: dict[tuple[str, bool], tuple[LossResult, torch.Tensor]] = {}
    for precision in ("float32", "bfloat16"):
        service = LocalServiceClient(device="cpu", precision=precision)
        policy = service.create_lora_training_client(small_dir, rank=2, seed=0)._policy
        assert policy.base.takes_trees
        policy._costs = DEAR_TOKENS
        for trees in (True, False):
            found[precision, trees] = evaluate(policy, data, "cross_entropy", trees=trees)
    exact = found["float32", False]
    for trees in (True, False):
        ours = found["bfloat16", trees]
        for mine, other in zip(ours[0].logprobs, exact[0].logprobs, strict=True):
            np.testing.assert_allclose(mine, other, atol=0.1)
        assert (ours[1] - exact[1]).norm() <= 0.02 * exact[1].norm()


def test_small_limits_change_trees_by_rounding_only(small_dir: str) -> None:
    results = []
    for limits in (EngineLimits(), EngineLimits(training_tokens=20, logits=520)):
        service = LocalServiceClient(device="cpu", limits=limits)
        policy = service.create_lora_training_client(small_dir, rank=0, seed=0)._policy
        policy._costs = DEAR_TOKENS
        data = [supervised([*range(1, 12), number, number + 1, 7]) for number in range(6)]
        results.append(evaluate(policy, data, "cross_entropy", trees=True))
    assert results[0][0].num_computed == 11 + 6 * 2
    assert results[0][0].num_computed < results[1][0].num_computed
    assert_alike(results[1], results[0], 1e-5)


def test_real_costs_choose_a_tree_for_a_group_and_rows_for_strangers(small_dir: str) -> None:
    client = LocalServiceClient(device="cpu").create_lora_training_client(small_dir, rank=2, seed=0)
    group = [supervised([*range(1, 200), number, 5, 6]) for number in range(8)]
    strangers = [supervised([number, *range(1, 30)]) for number in range(8)]
    assert client.forward(group, "cross_entropy").result().metrics["tree_token_ratio"] < 0.2
    assert client.forward(strangers, "cross_entropy").result().metrics["tree_token_ratio"] == 1.0


@pytest.mark.parametrize("why", ["layers", "attention", "logits"])
def test_a_model_that_takes_no_trees_trains_by_rows_and_says_so_once(
    why: str, model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(step: TreeStep, module: Any) -> torch.Tensor:
        raise UnsupportedAttentionError("it attends otherwise")

    forward = TreeStep.forward
    if why == "layers":
        monkeypatch.setattr(model, "_TREE_LAYERS", frozenset({"full_attention"}))
    else:
        wrong = {"attention": refuse, "logits": lambda step, module: 2 * forward(step, module)}
        monkeypatch.setattr(TreeStep, "forward", wrong[why])
    message = {"layers": "'sliding_attention'", "attention": "it attends otherwise", "logits": "are off by"}
    service = LocalServiceClient(device="cpu")
    with pytest.warns(UserWarning, match=f"computes every datum by itself.*{message[why]}"):
        client = service.create_lora_training_client(model_dir("gemma3"), rank=2, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        service.create_lora_training_client(model_dir("gemma3"), rank=2, seed=1)
    data = [supervised([*range(1, 30), number]) for number in range(3)]
    assert client.forward_backward(data, "cross_entropy").result().metrics["tree_token_ratio"] == 1.0


def test_training_by_trees_saves_the_models_own_configuration(small_dir: str, tmp_path: Path) -> None:
    service = LocalServiceClient(device="cpu", state_dir=tmp_path)
    client = service.create_lora_training_client(small_dir, rank=0, seed=0)
    client._policy._costs = DEAR_TOKENS
    train(client, [[1, 2, 3, 4], [1, 2, 3, 5]], steps=1, learning_rate=0.001)
    sampler = client.save_weights_and_get_sampling_client()
    path = client.save_weights_for_sampler("one").result().path
    again = service.create_sampling_client(path)
    assert sampler.sample(ints([1, 2]), 1, params()).result().sequences[0].tokens == (
        again.sample(ints([1, 2]), 1, params()).result().sequences[0].tokens
    )
