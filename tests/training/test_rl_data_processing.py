"""Swapped contexts: the specification's two unit tests, and what must hold for any trajectory and transform."""

import pytest
import tinker
from expert_making import Group, outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_cookbook.rl import data_processing as cookbook
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup
from transitions import as_plain, tokens, trajectories, transition

from viva.experts.strategy import Completion, ExpertGroupBuilder
from viva.training.batch import ExpertConfig, make_batch
from viva.training.data_processing import action_values, assemble_training_data, trajectory_to_data
from viva.training.samples import batch_samples


class NoEngine:
    """No estimator that needs no scores may ask for any."""


def test_context_swap_correctness():
    traj = Trajectory([transition([1, 2, 3], [4, 5], logprobs=[-0.1, -0.2])], tinker.ModelInput.empty())
    (datum,) = trajectory_to_data(
        traj, 1.5, context_transform=lambda observation, turn: tinker.ModelInput.from_ints([9, 9])
    )
    assert datum.model_input.to_ints() == [9, 9, 4]
    inputs = {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()}
    assert inputs["target_tokens"] == [9, 4, 5]
    assert inputs["logprobs"] == pytest.approx([0.0, -0.1, -0.2])
    assert inputs["mask"] == [0.0, 1.0, 1.0]
    assert inputs["advantages"] == [0.0, 1.5, 1.5]


async def test_stratified_weighting():
    def group(strategy_id, weight, rewards):
        trajs = [Trajectory([transition([1], [2])], tinker.ModelInput.empty()) for _ in rewards]
        builder = ExpertGroupBuilder(inner=Group(), strategy_id=strategy_id, weight=weight)
        return outcome(builder, trajs, rewards)

    outcomes = [group("iid", 0.75, [0.0, 1.0]), group("hint", 0.25, [0.0, 1.0] * 3)]
    config = ExpertConfig(estimator="importance_sampling", num_checked=0)
    batch = await make_batch(NoEngine(), outcomes, config)
    advantages = [datum.loss_fn_inputs["advantages"].tolist()[0] for datum in batch.data_D]
    iid, hint = 0.75 * 8 / 2, 0.25 * 8 / 6
    assert advantages == pytest.approx([-0.5 * iid, 0.5 * iid] + [-0.5 * hint, 0.5 * hint] * 3)
    assert batch.metrics["experts/iid/num_samples"] == 2
    assert batch.metrics["experts/hint/num_samples"] == 6
    assert batch.metrics["experts/iid/mixture_factor"] == pytest.approx(iid)
    unweighted = [group("iid", None, [0.0, 1.0]), group("hint", None, [0.0, 1.0] * 3)]
    batch = await make_batch(NoEngine(), unweighted, config)
    assert [datum.loss_fn_inputs["advantages"].tolist()[0] for datum in batch.data_D] == [-0.5, 0.5] * 4


@st.composite
def contexts(draw, size=5):
    """Training contexts by turn, of tokens 100 and up that no observation holds."""
    return draw(
        st.lists(st.lists(st.integers(100, 103), min_size=1, max_size=4), min_size=size, max_size=size)
    )


def swap(contexts_K):
    return lambda observation, turn: tinker.ModelInput.from_ints(contexts_K[turn])


def trained(datums):
    """Per trained token: everything before it, itself, its logprob and its advantage."""
    rows = []
    for datum in datums:
        inputs = {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()}
        tokens_T = [*datum.model_input.to_ints(), inputs["target_tokens"][-1]]
        for place, mask in enumerate(inputs["mask"]):
            if mask:
                before = tuple(tokens_T[: place + 1])
                rows.append(
                    (before, tokens_T[place + 1], inputs["logprobs"][place], inputs["advantages"][place])
                )
            else:
                assert inputs["advantages"][place] == 0.0
    return rows


@settings(deadline=None)
@given(trajectories(), contexts(), st.data())
def test_every_token_is_trained_verbatim_behind_its_own_training_context_alone(traj, contexts_K, data):
    advantages = [float(data.draw(st.integers(1, 9))) for _ in traj.transitions]
    rows = trained(trajectory_to_data(traj, advantages, swap(contexts_K)))
    expected = [
        ((*contexts_K[turn], *each.ac.tokens[:place]), token, logprob, advantages[turn])
        for turn, each in enumerate(traj.transitions)
        if not each.metrics
        for place, (token, logprob) in enumerate(zip(each.ac.tokens, each.ac.logprobs, strict=True))
    ]
    # merged turns have the same tokens before them: the later context then begins with the whole earlier datum
    assert [row[:2] for row in rows] == [row[:2] for row in expected]
    assert [row[2:] for row in rows] == [pytest.approx(row[2:]) for row in expected]


@settings(deadline=None)
@given(trajectories(), contexts())
def test_nothing_of_the_sampling_context_is_in_the_training_input(traj, contexts_K):
    found = [
        token
        for datum in trajectory_to_data(traj, 1.0, swap(contexts_K))
        for token in [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]]
    ]
    allowed = [
        token for turn, each in enumerate(traj.transitions) for token in contexts_K[turn] + each.ac.tokens
    ]
    assert sorted(found) == sorted(allowed)


@settings(deadline=None)
@given(trajectories(), st.floats(-3, 3))
def test_without_a_transform_datums_are_the_cookbooks(traj, advantage):
    theirs = [as_plain(datum) for datum in cookbook.trajectory_to_data(traj, advantage)]
    assert [as_plain(datum) for datum in trajectory_to_data(traj, advantage, None)] == theirs
    same = trajectory_to_data(traj, advantage, lambda observation, turn: observation)
    assert [as_plain(datum) for datum in same] == theirs


@settings(deadline=None)
@given(trajectories(), st.lists(st.booleans(), min_size=5, max_size=5), contexts())
def test_a_new_datum_starts_exactly_where_a_swap_breaks_the_prefix(traj, keeps, contexts_K):
    """A turn that keeps everything so far shares the datum, any other one starts its own."""
    history: list[int] = []
    made, num_datums = [], 0
    for turn, each in enumerate(traj.transitions):
        extends = keeps[turn] and bool(history)
        made.append((history if extends else []) + contexts_K[turn])
        num_datums += not extends
        history = made[-1] + each.ac.tokens
    datums = trajectory_to_data(
        traj,
        [float(turn + 1) for turn in range(len(made))],
        lambda ob, turn: tinker.ModelInput.from_ints(made[turn]),
    )
    # a context may by chance begin with all that was said before; then it shares the datum as well
    assert len(datums) <= num_datums
    rows = trained(datums)
    advantages = [
        float(turn + 1)
        for turn, each in enumerate(traj.transitions)
        if not each.metrics
        for _ in each.ac.tokens
    ]
    assert [row[3] for row in rows] == advantages


def test_an_earlier_turn_never_gets_a_later_turns_advantage():
    """Feedback dropped, attempt kept: the second context extends the first turn, so both share a datum."""
    first, second = transition([1, 2], [3, 4]), transition([1, 2, 3, 4, 50, 51], [6, 7])
    traj = Trajectory([first, second], tinker.ModelInput.empty())
    behind = {0: [1, 2], 1: [1, 2, 3, 4, 5]}
    (datum,) = trajectory_to_data(
        traj, [[0.0, 0.0], [2.0, 2.0]], lambda ob, turn: tinker.ModelInput.from_ints(behind[turn])
    )
    assert datum.model_input.to_ints() == [1, 2, 3, 4, 5, 6]
    assert datum.loss_fn_inputs["advantages"].tolist() == [0, 0, 0, 0, 2, 2]
    assert datum.loss_fn_inputs["mask"].tolist() == [0, 0, 0, 0, 1, 1]


def test_groups_are_assembled_each_with_its_own_transform():
    groups = [
        TrajectoryGroup([Trajectory([transition([g, 1], [2])], tinker.ModelInput.empty())], [0.0], [{}])
        for g in range(2)
    ]
    data, _ = assemble_training_data(groups, [[1.0], [1.0]], [None, swap([[9]])])
    assert [datum.model_input.to_ints() for datum in data] == [[0, 1], [9]]


def test_an_empty_training_context_is_refused():
    traj = Trajectory([transition([1], [2])], tinker.ModelInput.empty())
    with pytest.raises(ValueError, match="training context of turn 0 is empty"):
        trajectory_to_data(traj, 1.0, lambda observation, turn: tinker.ModelInput.empty())


class Choosing(Group):
    strategy_id = "chosen"

    def __init__(self, chosen, contexts_K):
        super().__init__()
        self.chosen = chosen
        self.context_transform = None if contexts_K is None else swap(contexts_K)

    def completions(self, group):
        return [self.chosen for _ in group.trajectories_G]


@st.composite
def chosen_completions(draw, traj):
    chosen = []
    for turn, each in enumerate(traj.transitions):
        if draw(st.booleans()):
            start = draw(st.integers(0, len(each.ac.tokens)))
            stop = draw(st.integers(start, len(each.ac.tokens)))
            chosen.append(
                Completion(
                    transition=turn,
                    start=start,
                    stop=stop,
                    with_end=stop < len(each.ac.tokens) and draw(st.booleans()),
                    weight=draw(st.sampled_from([0.0, 0.5, 1.0])),
                )
            )
    return chosen


@settings(deadline=None)
@given(trajectories(), contexts(), st.booleans(), st.data())
def test_completions_are_trained_verbatim_and_nothing_else_is(traj, contexts_K, is_swapped, data):
    chosen = data.draw(chosen_completions(traj))
    samples = batch_samples([outcome(Choosing(chosen, contexts_K if is_swapped else None), [traj], [0.0])])
    expected = [
        (
            (
                *(contexts_K[each.transition] if is_swapped else turn.ob.to_ints()),
                *turn.ac.tokens[each.start * is_swapped : min(place, each.stop) if is_swapped else place],
            ),
            turn.ac.tokens[place],
            turn.ac.logprobs[place],
            each.weight,
        )
        for each in chosen
        for turn in [traj.transitions[each.transition]]
        if not turn.metrics and each.weight > 0
        for place in [*range(each.start, each.stop), *[len(turn.ac.tokens) - 1] * each.with_end]
    ]
    rows = trained([datum for sample in samples for datum in sample.data_D])
    assert [row[:2] for row in rows] == [row[:2] for row in expected]
    assert [row[2:] for row in rows] == [pytest.approx(row[2:]) for row in expected]
    for sample in samples:
        assert sum(len(action_values(datum, "mask")) for datum in sample.data_D) == len(expected)
        assert sample.is_swapped == is_swapped


@given(tokens)
def test_completions_that_do_not_fit_are_refused(action):
    traj = Trajectory([transition([1], action)], tinker.ModelInput.empty())
    for chosen, message in [
        ([Completion(transition=1)], "at most one completion in each of its 1 turns"),
        ([Completion(transition=0), Completion(transition=0)], "at most one completion"),
        ([Completion(transition=0, stop=len(action) + 1)], "reaches beyond"),
        ([Completion(transition=0, with_end=True)], "no stop token behind it"),
    ]:
        with pytest.raises(ValueError, match=message):
            batch_samples([outcome(Choosing(chosen, None), [traj], [0.0])])
