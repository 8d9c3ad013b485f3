"""The tokens that a run keeps: the numbers that trained them, in the places where they were sampled."""

import json

import numpy as np
import pytest
import tinker
from bandit_engine import CountGroup
from bandit_runs import make_run
from context_engine import BARE, HINT, ContextEngine, config, hint, iid, logprobs_of
from credited_groups import STREAM, Credited
from expert_making import Group, outcome
from tinker_cookbook.rl.types import Trajectory
from transitions import transition

from viva.training.batch import make_batch, plain_batch
from viva.training.loop import train
from viva.training.records import chosen_groups, token_rows


def texts(tokens):
    return [f"<{token}>" for token in tokens]


def kept(folder):
    return [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]


def tensors(logprobs_D):
    return [tinker.TensorData.from_numpy(np.asarray(values, dtype=np.float32)) for values in logprobs_D]


async def test_a_run_keeps_one_group_every_so_many_steps_with_the_spans_that_earned(tmp_path):
    await train(make_run(tmp_path, group_class=Credited, tokens_every=2))
    rows = kept(tmp_path)
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert all(row["strategy"] == "iid" and len(row["turns"]) == 4 for row in rows)
    turns = [turn for row in rows for turn in row["turns"]]
    assert all(turn["spans"][0]["stream"] == STREAM and turn["spans"][0]["stop"] == 1 for turn in turns)
    assert any(turn["mask"][0] for turn in turns)
    for turn in turns:
        assert not any(turn["mask"][1:])
        assert [value is None for value in turn["training"]] == [not trained for trained in turn["mask"]]
        for new, old in zip(turn["training"], turn["sampling"], strict=True):
            assert new is None or new == pytest.approx(old, abs=1e-5)


async def test_nothing_is_kept_if_nothing_is_asked_for_and_keeping_changes_nothing_else(tmp_path):
    await train(make_run(tmp_path / "none", tokens_every=0))
    await train(make_run(tmp_path / "all", tokens_every=1))
    assert not (tmp_path / "none" / "tokens.jsonl").exists()
    assert len(kept(tmp_path / "all")) == 6
    one, other = ((tmp_path / name / "transcripts.jsonl").read_bytes() for name in ("none", "all"))
    assert one == other


def two_turns(*, masked=False):
    first = transition([1], [5, 6], logprobs=[-1.0, -2.0])
    second = transition([1, 5, 6, 9], [7], logprobs=[-3.0], masked=masked)
    return Trajectory([first, second], tinker.ModelInput.empty())


def test_training_logprobs_land_on_the_tokens_they_belong_to():
    plain = outcome(Group(), [two_turns(), two_turns(masked=True)], [1.0, 0.0])
    batch = plain_batch([plain])
    lengths = [len(datum.loss_fn_inputs["mask"].data) for datum in batch.data_D]
    logprobs_D = [np.arange(length) + 10.0 * place for place, length in enumerate(lengths)]
    (row,) = token_rows([plain], [0], batch, tensors(logprobs_D), texts)
    first, second = row["turns"][:2]
    # targets 5 6 9 7: places 0 and 1 are the first turn, place 2 is context, place 3 the second turn
    assert (first["training"], second["training"]) == ([0.0, 1.0], [3.0])
    assert (first["sampling"], second["sampling"]) == ([-1.0, -2.0], [-3.0])
    assert (first["pieces"], first["advantages"], first["mask"]) == (["<5>", "<6>"], [0.5, 0.5], [1, 1])
    assert first["spans"] == [{"start": 0, "stop": 2, "stream": "reward", "reward": 1.0}]
    assert (row["turns"][2]["training"], row["turns"][2]["advantages"]) == ([10.0, 11.0], [-0.5, -0.5])
    assert (row["turns"][3]["training"], row["turns"][3]["mask"]) == ([None], [0])


async def test_samples_of_strategies_have_anchor_weight_and_both_contexts():
    outcomes_P = [iid(), hint()]
    batch = await make_batch(ContextEngine(), outcomes_P, config())
    old_D = [
        logprobs_of(BARE, datum.loss_fn_inputs["target_tokens"].to_numpy()) - 0.5 for datum in batch.data_D
    ]
    made = tensors(old_D)
    plain, swapped = token_rows(outcomes_P, [0, 1], batch, made, texts)
    assert (plain["strategy"], swapped["strategy"]) == ("iid", "hint")
    assert (plain["turns"][0]["sampled_in"], swapped["turns"][0]["sampled_in"]) == (None, f"<{HINT}>")
    for seat, turn in enumerate(swapped["turns"]):
        action = [3, 4, seat]
        old, sampled = logprobs_of(BARE, action), logprobs_of(HINT, action)
        assert (turn["seat"], turn["turn"], turn["ids"], turn["trained_in"]) == (seat, 0, action, f"<{BARE}>")
        assert turn["sampling"] == pytest.approx(sampled.tolist(), rel=1e-5)
        assert turn["anchor"] == pytest.approx(old.tolist(), rel=1e-5)
        assert turn["training"] == pytest.approx((old - 0.5).tolist(), rel=1e-5)
        assert turn["weights"] == pytest.approx(np.minimum(np.exp(old - sampled), 2.0).tolist(), rel=1e-5)
        assert turn["advantages"] == pytest.approx(
            [(seat - 0.5) * each for each in turn["weights"]], rel=1e-5
        )


def test_one_group_of_every_strategy_is_chosen_and_void_ones_never():
    void = outcome(CountGroup(0), [], [])
    outcomes_P = [iid(), iid(), hint(), iid(), hint()]
    seen = {tuple(chosen_groups(outcomes_P, seed=1, step=step)) for step in range(40)}
    assert seen == {(one, other) if one < other else (other, one) for one in (0, 1, 3) for other in (2, 4)}
    assert chosen_groups([], seed=1, step=0) == []
    assert chosen_groups([void], seed=1, step=0) == [0]
