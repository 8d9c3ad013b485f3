"""What of a seat is trained, and behind what: every field of a sample, counted by hand."""

import dataclasses

import numpy as np
import pytest
import tinker
from expert_making import Group, outcome
from tinker_cookbook.rl.types import Trajectory
from transitions import transition

from viva.experts.strategy import Completion
from viva.training.data_processing import action_values
from viva.training.rollouts import GroupOutcome
from viva.training.samples import batch_samples, context_key, with_values

SEEN, BARE = [20, 21], [10]
"""A sampling context and a training context."""


class Chosen(Group):
    """Trains the same completions of every seat."""

    def __init__(self, completions=None, *, trained_in=None, strategy_id="hint"):
        super().__init__()
        self.strategy_id = strategy_id
        if completions is not None:
            self.completions = lambda group: [completions for _ in group.trajectories_G]
        if trained_in is not None:
            self.context_transform = lambda observation, turn: tinker.ModelInput.from_ints(trained_in)


def played(*turns):
    """A trajectory; each turn is (observation, action) with an optional reason for its end."""
    transitions = []
    for observation, action, *reason in turns:
        made = transition(observation, action)
        stopped = dataclasses.replace(made.ac, stop_reason=reason[0] if reason else "stop")
        transitions.append(dataclasses.replace(made, ac=stopped))
    return Trajectory(transitions, tinker.ModelInput.empty())


def samples_of(builder, *trajectories, rewards=None, **options):
    rewards = [0.0] * len(trajectories) if rewards is None else rewards
    return batch_samples([outcome(builder, trajectories, rewards, **options)])


def only_turn(builder, *turns):
    (sample,) = samples_of(builder, played(*turns))
    (turn,) = sample.turns_K
    return sample, turn


def test_a_sample_knows_where_it_comes_from_and_whether_it_ended_by_itself():
    void = GroupOutcome(builder=Chosen(), group=None, void_reason="x")
    group = outcome(
        Chosen(strategy_id="talk"),
        [played((SEEN, [1, 2])), played((SEEN, [3])), played((SEEN, [4], "length"))],
        [0.5, 1.5, 2.5],
        failed_seats=frozenset({1}),
    )
    first, last = batch_samples([void, group])
    assert (first.outcome_index, first.seat, first.reward, first.finished) == (1, 0, 0.5, True)
    assert (last.outcome_index, last.seat, last.reward, last.finished) == (1, 2, 2.5, False)
    assert first.strategy == last.strategy == "talk"
    assert first.advantages_T is last.advantages_T is None
    assert not first.is_swapped


def test_only_the_turns_that_are_trained_must_have_ended_by_themselves():
    turns = ((SEEN, [1], "length"), ([5], [2], "stop"))
    (sample,) = samples_of(Chosen([Completion(transition=1)]), played(*turns))
    assert sample.finished
    assert [turn.turn for turn in sample.turns_K] == [1]
    (sample,) = samples_of(Chosen([Completion(transition=1), Completion(transition=0)]), played(*turns))
    assert not sample.finished
    assert [turn.turn for turn in sample.turns_K] == [0, 1]  # in the order they were played


@pytest.mark.parametrize(
    "completions",
    [[], [Completion(transition=0, weight=0.0)], [Completion(transition=0, start=1, stop=1)]],
    ids=["nothing", "weight-zero", "empty"],
)
def test_a_seat_of_which_nothing_is_trained_has_no_sample(completions):
    assert samples_of(Chosen(completions), played((SEEN, [1, 2]))) == []


def test_a_reply_that_its_environment_masks_has_no_sample_and_the_other_turns_keep_theirs():
    masked, plain = transition(SEEN, [1, 2], masked=True), transition([7], [3])
    assert samples_of(Chosen(), Trajectory([masked], tinker.ModelInput.empty())) == []
    (sample,) = samples_of(Chosen(), Trajectory([masked, plain], tinker.ModelInput.empty()))
    assert [(turn.turn, turn.tokens) for turn in sample.turns_K] == [(1, (3,))]


def test_samples_that_are_trained_behind_the_same_context_answer_the_same_question():
    def prompts(*builders):
        groups = [outcome(builder, [played((SEEN, [1])), played(([7], [2]))], [0, 0]) for builder in builders]
        return [sample.prompt for sample in batch_samples(groups)]

    swapped = Chosen(trained_in=BARE)
    assert len(set(prompts(swapped, swapped))) == 1
    bare, other, different = prompts(swapped)[0], prompts(Chosen())[0], prompts(Chosen(trained_in=[11]))[0]
    assert len({bare, other, different}) == 3
    (plain,) = samples_of(Chosen(), played((BARE, [1])))
    assert plain.prompt == bare  # swapped or seen, it is the same question


def test_a_group_is_named_after_its_first_seat_that_played():
    empty = Trajectory([], tinker.ModelInput.empty())
    (sample,) = samples_of(Chosen(), empty, played((BARE, [1])))
    (plain,) = samples_of(Chosen(), played((BARE, [1])))
    assert (sample.seat, sample.prompt) == (1, plain.prompt)


def test_without_a_swap_the_tokens_before_a_completion_stay_as_context():
    completion = Completion(transition=0, start=1, stop=3, weight=0.5)
    sample, turn = only_turn(Chosen([completion]), (SEEN, [5, 6, 7, 8]))
    assert turn.sampled_in == turn.trained_in == (*SEEN, 5)
    assert (turn.turn, [*turn.places], turn.tokens, turn.weights) == (0, [1, 2], (6, 7), (0.5, 0.5))
    assert not turn.has_gap
    assert not sample.is_swapped
    (datum,) = sample.data_D
    assert datum.model_input.to_ints() == [*SEEN, 5, 6]
    assert action_values(datum, "target_tokens").tolist() == [6, 7]
    assert action_values(datum, "advantages").tolist() == [0.5, 0.5]


def test_with_a_swap_they_go_with_the_context_they_were_sampled_in():
    completion = Completion(transition=0, start=1, stop=3)
    sample, turn = only_turn(Chosen([completion], trained_in=BARE), (SEEN, [5, 6, 7, 8]))
    assert turn.sampled_in == (*SEEN, 5)
    assert turn.trained_in == tuple(BARE)
    assert (turn.places, turn.tokens, turn.has_gap) == ([1, 2], (6, 7), False)
    assert sample.is_swapped
    (datum,) = sample.data_D
    assert datum.model_input.to_ints() == [*BARE, 6]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [6, 7]


@pytest.mark.parametrize(("trained_in", "gap"), [(None, False), (BARE, True)])
def test_the_stop_token_can_be_trained_without_what_lies_before_it(trained_in, gap):
    completion = Completion(transition=0, stop=1, with_end=True)
    sample, turn = only_turn(Chosen([completion], trained_in=trained_in), (SEEN, [5, 6, 7, 8]))
    assert turn.has_gap is gap
    assert sample.is_swapped is gap
    assert turn.tokens == ((5, 8) if gap else (5, 6, 7, 8))
    assert turn.weights == ((1.0, 1.0) if gap else (1.0, 0.0, 0.0, 1.0))
    (datum,) = sample.data_D
    logprobs = transition(SEEN, [5, 6, 7, 8]).ac.logprobs
    assert action_values(datum, "logprobs").tolist() == pytest.approx([logprobs[0], logprobs[3]])
    assert action_values(datum, "target_tokens").tolist() == [5, 8]


def test_an_end_right_behind_a_completion_leaves_no_gap():
    completion = Completion(transition=0, stop=2, with_end=True)
    _, turn = only_turn(Chosen([completion], trained_in=BARE), (SEEN, [5, 6, 7]))
    assert (turn.has_gap, turn.tokens) == (False, (5, 6, 7))


def test_a_gap_alone_makes_a_sample_swapped():
    same = Chosen([Completion(transition=0, stop=1, with_end=True)], trained_in=SEEN)
    sample, turn = only_turn(same, (SEEN, [5, 6, 7]))
    assert turn.sampled_in == turn.trained_in
    assert sample.is_swapped


@pytest.mark.parametrize(
    ("completion", "reason", "message"),
    [
        (Completion(transition=0, stop=4), "stop", "reaches beyond the 3 tokens of its turn"),
        (Completion(transition=0, stop=3, with_end=True), "stop", "no stop token behind it in a turn of 3"),
        (Completion(transition=0, stop=1, with_end=True), "length", "no stop token behind it in a turn of 3"),
        (Completion(transition=1), "stop", "at most one completion in each of its 1 turns; got turns .1."),
    ],
)
def test_completions_beyond_what_was_sampled_are_refused(completion, reason, message):
    with pytest.raises(ValueError, match=message):
        samples_of(Chosen([completion]), played((SEEN, [5, 6, 7], reason)))


def test_advantages_of_a_strategy_stand_at_its_trained_tokens():
    chosen = [
        Completion(transition=0, start=1, advantage=2.0),
        Completion(transition=1, advantage=-1.0, weight=0.5),
    ]
    (sample,) = samples_of(Chosen(chosen), played((SEEN, [5, 6, 7]), ([8], [9])))
    assert sample.advantages_T.tolist() == [2.0, 2.0, -1.0]
    half = [Completion(transition=0, advantage=2.0), Completion(transition=1)]
    with pytest.raises(ValueError, match=r"'hint' gives an advantage to some completions .* not to others"):
        samples_of(Chosen(half), played((SEEN, [5]), ([8], [9])))


def test_values_are_put_at_the_trained_tokens_of_all_datums_in_order():
    chosen = [Completion(transition=0, start=1), Completion(transition=1)]
    (sample,) = samples_of(Chosen(chosen), played((SEEN, [5, 6, 7]), ([8], [9])))
    first, second = with_values(sample.data_D, np.array([1.0, 2.0, 3.0]), np.array([-4.0, -5.0, -6.0]))
    assert first.loss_fn_inputs["advantages"].tolist() == [0, 0, 1, 2]
    assert first.loss_fn_inputs["logprobs"].tolist() == [0, 0, -4, -5]
    assert second.loss_fn_inputs["advantages"].tolist() == [3]
    assert second.loss_fn_inputs["logprobs"].tolist() == [-6]
    for before, after in zip(sample.data_D, (first, second), strict=True):
        assert after.model_input == before.model_input
        assert after.loss_fn_inputs.keys() == before.loss_fn_inputs.keys()
        for name in ("mask", "target_tokens"):
            assert after.loss_fn_inputs[name].tolist() == before.loss_fn_inputs[name].tolist()
        assert after.loss_fn_inputs["advantages"].dtype == "float32"
    assert action_values(first, "logprobs").dtype == np.float64


def test_contexts_are_compared_by_tokens_and_by_what_their_images_are():
    def image(place):
        return tinker.types.ImageAssetPointerChunk(location=place, format="png", expected_tokens=3)

    assert context_key([1, image("a"), 2]) == context_key([1, image("a"), 2])
    keys = [[1, image("a")], [1, image("b")], [image("a"), 1], [1], [2]]
    assert len({context_key(elements) for elements in keys}) == 5
