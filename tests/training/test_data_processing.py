"""Datums: equal to tinker-cookbook's on its own inputs, exact where they go beyond it."""

import pytest
import tinker
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_cookbook.rl import data_processing as cookbook
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup
from transitions import as_plain, trajectories, transition

from viva.training.data_processing import assemble_training_data, trajectory_to_data


@settings(deadline=None)
@given(trajectories(), st.floats(-3, 3))
def test_datums_equal_the_cookbooks(traj, advantage):
    ours, theirs = trajectory_to_data(traj, advantage), cookbook.trajectory_to_data(traj, advantage)
    assert [as_plain(datum) for datum in ours] == [as_plain(datum) for datum in theirs]


@settings(deadline=None)
@given(trajectories(), st.floats(-3, 3).filter(bool))
def test_a_number_per_turn_or_per_token_says_the_same_as_one_number(traj, advantage):
    once = [as_plain(datum) for datum in trajectory_to_data(traj, advantage)]
    per_turn = [advantage] * len(traj.transitions)
    per_token = [[advantage] * len(turn.ac.tokens) for turn in traj.transitions]
    assert [as_plain(datum) for datum in trajectory_to_data(traj, per_turn)] == once
    assert [as_plain(datum) for datum in trajectory_to_data(traj, per_token)] == once


@settings(deadline=None)
@given(trajectories(), st.data())
def test_tokens_that_earned_nothing_are_masked_and_datums_of_nothing_else_are_left_out(traj, data):
    earned = [[float(data.draw(st.booleans())) for _ in turn.ac.tokens] for turn in traj.transitions]
    data_D, _ = assemble_training_data([TrajectoryGroup([traj], [0.0], [{}])], [[earned]])
    everything = trajectory_to_data(traj, earned)
    assert [as_plain(datum) for datum in data_D] == [
        as_plain(datum) for datum in everything if any(datum.loss_fn_inputs["advantages"].data)
    ]
    for datum in data_D:
        assert any(datum.loss_fn_inputs["mask"].data)
        assert list(datum.loss_fn_inputs["mask"].data) == list(datum.loss_fn_inputs["advantages"].data)


@settings(deadline=None)
@given(trajectories(), st.data())
def test_every_action_token_gets_its_own_advantage_and_nothing_else_gets_any(traj, data):
    per_token = [
        data.draw(st.lists(st.integers(1, 99), min_size=len(turn.ac.tokens), max_size=len(turn.ac.tokens)))
        for turn in traj.transitions
    ]
    datums = trajectory_to_data(traj, per_token)
    expected = [
        (token, float(advantage))
        for turn, advantages in zip(traj.transitions, per_token, strict=True)
        for token, advantage in zip(turn.ac.tokens, advantages, strict=True)
        if not turn.metrics
    ]
    found, num_zero = [], 0
    for datum in datums:
        inputs = {name: tensor.to_numpy().tolist() for name, tensor in datum.loss_fn_inputs.items()}
        for token, advantage, mask in zip(
            inputs["target_tokens"], inputs["advantages"], inputs["mask"], strict=True
        ):
            assert (advantage != 0.0) == (mask == 1.0)
            if mask:
                found.append((token, advantage))
            num_zero += mask == 0.0
    assert found == expected
    assert num_zero + len(found) == sum(datum.model_input.length for datum in datums)


def test_turns_that_extend_each_other_share_a_datum():
    turns = [transition([1, 2], [3]), transition([1, 2, 3, 4], [5, 6]), transition([9], [7])]
    first, second = trajectory_to_data(Trajectory(turns, tinker.ModelInput.empty()), [1.0, 2.0, 3.0])
    assert first.model_input.to_ints() == [1, 2, 3, 4, 5]
    assert first.loss_fn_inputs["advantages"].tolist() == [0, 1, 0, 2, 2]
    assert second.loss_fn_inputs["advantages"].tolist() == [3]


def test_an_episode_that_ended_before_its_first_turn_has_no_datum():
    assert trajectory_to_data(Trajectory([transition([], [])], tinker.ModelInput.empty()), 1.0) == []
    assert trajectory_to_data(Trajectory([], tinker.ModelInput.empty()), 1.0) == []


IMAGE = tinker.types.ImageAssetPointerChunk(location="x", format="png", expected_tokens=3)


@pytest.mark.parametrize("before", [[], [tinker.EncodedTextChunk(tokens=[1])]], ids=["alone", "behind text"])
def test_images_keep_their_place_and_take_no_part(before):
    turn = transition([1], [7, 8])
    turn.ob = tinker.ModelInput(chunks=[*before, IMAGE])
    traj = Trajectory([turn], tinker.ModelInput.empty())
    ours, theirs = trajectory_to_data(traj, 1.0)[0], cookbook.trajectory_to_data(traj, 1.0)[0]
    assert ours.model_input == theirs.model_input
    for name, tensor in ours.loss_fn_inputs.items():
        assert tensor.tolist() == theirs.loss_fn_inputs[name].tolist()


def test_a_datum_without_a_token_to_predict_is_refused():
    alone, image = transition([], [3]), transition([1], [])
    image.ob = tinker.ModelInput(chunks=[IMAGE])
    for turn, found in (
        (alone, "got a length of 1, with 3 last"),
        (image, "got a length of 3, with ImageAsset.* last"),
    ):
        with pytest.raises(ValueError, match=found):
            trajectory_to_data(Trajectory([turn], tinker.ModelInput.empty()), 1.0)


def test_advantages_that_do_not_fit_are_refused():
    traj = Trajectory([transition([1], [2, 3])], tinker.ModelInput.empty())
    with pytest.raises(ValueError, match="must match the 1 transitions; got 2"):
        trajectory_to_data(traj, [1.0, 2.0])
    with pytest.raises(ValueError, match=r"2 tokens needs as many logprobs and advantages; .* 1 advantages"):
        trajectory_to_data(traj, [[1.0]])


def test_a_batch_is_assembled_like_the_cookbooks_and_members_can_be_left_out():
    groups = [
        TrajectoryGroup(
            [Trajectory([transition([g, 1], [2, s])], tinker.ModelInput.empty()) for s in range(2)],
            [0.0, 1.0],
            [{}, {}],
        )
        for g in range(2)
    ]
    advantages = cookbook.compute_advantages(groups)
    theirs, places = cookbook.assemble_training_data(groups, advantages)
    ours, sources = assemble_training_data(groups, [row.tolist() for row in advantages])
    assert [as_plain(datum) for datum in ours] == [as_plain(datum) for datum in theirs]
    assert sources == [(place["group_idx"], place["traj_idx"]) for place in places]
    _, sources = assemble_training_data(groups, [[None, 1.0], [None, None]])
    assert sources == [(0, 1)]


def test_torch_reads_what_we_write():
    datum = trajectory_to_data(Trajectory([transition([1], [2, 3])], tinker.ModelInput.empty()), 0.5)[0]
    assert datum.loss_fn_inputs["advantages"].to_torch().dtype is torch.float32
    assert datum.loss_fn_inputs["target_tokens"].to_torch().tolist() == [2, 3]
