"""Batches of several strategies: what is scored, what the estimators get, what reaches the engine."""

import json
from collections import Counter

import numpy as np
import pytest
import tinker
from bandit_engine import CountGroup
from bandit_runs import make_run, metrics_of
from context_engine import BARE, HINT, OTHER, ContextEngine, Named, config, drawn, hint, iid, logprobs_of
from expert_making import outcome
from tinker_cookbook.rl.types import Trajectory

from viva.experts.estimators import ESTIMATORS
from viva.experts.samples import stored_sample
from viva.rewards.credit import GroupCredit, SpanCredit
from viva.training.batch import EstimatorStoppedError, ExpertConfig, make_batch
from viva.training.data import MixtureDataset, PromptItem, PromptOrder
from viva.training.loop import train
from viva.training.rollouts import GroupOutcome


def inputs_of(datum, name):
    values = datum.loss_fn_inputs[name].to_numpy()
    return values[datum.loss_fn_inputs["mask"].to_numpy() > 0].tolist()


async def test_swapped_samples_are_scored_once_behind_the_training_context_and_the_gap_is_a_weight():
    engine = ContextEngine()
    batch = await make_batch(engine, [iid(), hint()], config())
    assert engine.requests == [[[BARE, 3, 4], [BARE, 3, 4]]]
    for seat, datum in enumerate(batch.data_D[2:]):
        action = [3, 4, seat]
        old, sampled = logprobs_of(BARE, action), logprobs_of(HINT, action)
        assert datum.model_input.to_ints() == [BARE, 3, 4]
        assert inputs_of(datum, "logprobs") == pytest.approx(old.tolist())
        weights = np.minimum(np.exp(old - sampled), 2.0)
        assert inputs_of(datum, "advantages") == pytest.approx(((seat - 0.5) * weights).tolist())
    for seat, datum in enumerate(batch.data_D[:2]):
        assert inputs_of(datum, "logprobs") == pytest.approx(logprobs_of(BARE, [1, 2, seat]).tolist())
        assert inputs_of(datum, "advantages") == [seat - 0.5] * 3
    assert batch.foreign_D == [False, False, True, True]  # the anchors of the last two are the trainer's own
    assert batch.metrics["experts/hint/token_gap_mean"] > 0
    assert batch.metrics["experts/hint/hint_reliance"] > 0
    assert batch.metrics["experts/scored_tokens"] == 6


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_every_estimator_that_trains_swapped_samples_tells_the_same_log_ratios(temperature):
    names = [name for name in ESTIMATORS if name not in ("distill", "balance", "seq_is")]
    figures = {}
    for name in names:
        batch = await make_batch(ContextEngine(), [iid(), hint()], config(name), temperature=temperature)
        figures[name] = {
            key: value
            for key, value in batch.metrics.items()
            if "_gap_" in key and key.startswith("experts/hint/")
        }
        assert {"experts/hint/effective_sample_size", "experts/hint/weight_mean"} <= set(batch.metrics)
    assert len(figures["shaped"]) >= 8
    assert all(own == figures["shaped"] for own in figures.values()), figures


async def test_the_seeds_estimator_marks_foreign_logprobs():
    engine = ContextEngine()
    batch = await make_batch(engine, [iid(), hint()], config("importance_sampling"))
    assert engine.requests == [[[BARE, 3, 4], [BARE, 3, 4]]]  # for its log-ratio, which no weight needs
    assert batch.foreign_D == [False, False, True, True]
    assert inputs_of(batch.data_D[3], "logprobs") == pytest.approx(logprobs_of(HINT, [3, 4, 1]).tolist())


async def test_balance_scores_every_completion_behind_the_other_contexts_of_its_prompt():
    engine = ContextEngine()
    other = outcome(
        Named("talk", trained_in=BARE), [drawn(OTHER + seat, [5, seat]) for seat in range(2)], [0.0, 1.0]
    )
    batch = await make_batch(engine, [iid(), hint(), other], config("balance"))
    (request,) = engine.requests
    names = Counter(tuple(row[1:]) for row in request)
    # iid: hint and both talks; hint: its own bare score and both talks; a talk: bare, hint and the other talk
    assert names == {(1, 2): 2 * 3, (3, 4): 2 * 3, (5,): 2 * 3}
    records = {(row["group"], row["seat"]): row for row in batch.records}
    assert set(records[0, 0]["context_logprobs"]) == {"hint", "talk 0", "talk 1"}
    assert set(records[1, 0]["context_logprobs"]) == {"talk 0", "talk 1"}
    assert records[2, 1]["context"] == "talk 1"
    assert records[2, 1]["context_logprobs"]["talk 0"] == pytest.approx(logprobs_of(OTHER, [5, 1]).tolist())
    assert records[2, 1]["context_logprobs"]["hint"] == pytest.approx(logprobs_of(HINT, [5, 1]).tolist())


async def test_distillation_scores_own_samples_behind_the_teacher_only():
    engine = ContextEngine()
    batch = await make_batch(
        engine, [iid(), hint()], config("distill", estimator_options={"teacher": "hint"})
    )
    assert engine.requests == [[[HINT, 1, 2], [HINT, 1, 2]]]
    assert len(batch.data_D) == 2
    gap = logprobs_of(HINT, [1, 2, 1]) - logprobs_of(BARE, [1, 2, 1])
    assert inputs_of(batch.data_D[1], "advantages") == pytest.approx(gap.tolist())


async def test_comparing_contexts_needs_one_turn_and_one_training_context_per_prompt():
    twice = Trajectory(drawn(BARE, [1]).transitions * 2, tinker.ModelInput.empty())
    turns = outcome(Named("turns"), [twice], [1.0])
    with pytest.raises(EstimatorStoppedError, match="is trained in 2 turns"):
        await make_batch(ContextEngine(), [iid(), turns], config("balance"))
    late = outcome(Named("late", weights=(0.0, 1.0)), [twice], [1.0])
    late.builder.context_transform = lambda observation, turn: tinker.ModelInput.from_ints(
        [BARE, 7][: turn + 1]
    )
    with pytest.raises(EstimatorStoppedError, match="one training context for all samples of a prompt"):
        await make_batch(ContextEngine(), [iid(), late], config("balance"))


async def test_waste_is_told_with_advice_or_stops():
    wasted = [iid(), hint(context=0)]
    batch = await make_batch(ContextEngine(), wasted, config("seq_tis", min_effective_share=1.0))
    assert any("'hint'" in text and "effective sample size" in text for text in batch.warnings)
    with pytest.raises(EstimatorStoppedError, match="effective sample size"):
        await make_batch(ContextEngine(), wasted, config("seq_tis", min_effective_share=1.0, on_waste="stop"))


async def test_the_sampler_is_checked_against_the_trainer_on_some_own_samples():
    engine = ContextEngine()
    batch = await make_batch(engine, [iid(), hint()], config(num_checked=1))
    assert batch.metrics["experts/iid/self_check"] < 1e-6
    assert batch.warnings == []
    assert inputs_of(batch.data_D[1], "logprobs") == pytest.approx(logprobs_of(BARE, [1, 2, 1]).tolist())
    other = outcome(Named("iid"), [drawn(BARE, [1])], [1.0])
    other.group.trajectories_G[0].transitions[0].ac.maybe_logprobs[0] -= 1.0
    batch = await make_batch(ContextEngine(), [other], config(num_checked=1))
    assert "sampler and trainer differ by 1 nats" in batch.warnings[0]


async def test_temperature_is_part_of_the_sampler():
    engine = ContextEngine()
    await make_batch(engine, [iid()], config(), temperature=0.7)
    assert len(engine.requests[0]) == 2  # what was drawn hotter or colder is not the policy's own
    with pytest.raises(ValueError, match="at temperature 0 there are none"):
        await make_batch(engine, [iid()], config(), temperature=0.0)
    with pytest.raises(ValueError, match="balance compares contexts"):
        await make_batch(engine, [iid()], config("balance"), temperature=0.7)


async def test_samples_at_the_temperature_that_is_trained_are_the_policys_own():
    engine = ContextEngine()
    batch = await make_batch(engine, [iid(), hint()], config(), temperature=0.7, trained_at=0.7)
    assert engine.requests == [[[BARE, 3, 4], [BARE, 3, 4]]]  # the swapped ones alone
    assert engine.configs == [{"temperature": 0.7}]
    assert batch.foreign_D == [False, False, True, True]
    engine = ContextEngine()
    batch = await make_batch(engine, [iid()], config(), temperature=1.0, trained_at=0.7)
    assert (len(engine.requests[0]), engine.configs) == (2, [{"temperature": 0.7}])
    assert batch.foreign_D == [True, True]
    await make_batch(ContextEngine(), [iid(), hint()], config("balance"), temperature=0.7, trained_at=0.7)
    with pytest.raises(ValueError, match=r"scored at temperature 0\.7; got temperature=1"):
        await make_batch(ContextEngine(), [iid()], config("balance"), temperature=1.0, trained_at=0.7)


async def test_what_environments_report_comes_with_its_standard_error_over_groups():
    rows = [[{"correct": 1.0}, {"correct": 1.0}], [{"correct": 0.0}, {"correct": 1.0}], [{}, {"leak": 1.0}]]
    groups = [
        outcome(Named("iid"), [drawn(BARE, [1, place])] * 2, [0.0, 1.0], metrics=row)
        for place, row in enumerate(rows)
    ]
    metrics = (await make_batch(ContextEngine(), groups, config())).metrics
    assert metrics["experts/iid/env/correct"] == 0.75
    # groups are 0.5 above and below in sum: sqrt(2 / 1 * (0.25 + 0.25)) / 4
    assert metrics["experts/iid/env/correct_stderr"] == pytest.approx(0.25)
    assert "experts/iid/env/leak_stderr" not in metrics  # one group alone has no error


async def test_groups_of_nothing_and_failed_seats_are_counted_and_not_trained():
    void = GroupOutcome(builder=Named("hint", trained_in=BARE, weight=1.0), group=None, void_reason="x")
    played = iid((0.0, 1.0, 5.0), weight=3.0)
    played = GroupOutcome(builder=played.builder, group=played.group, failed_seats=frozenset({2}))
    batch = await make_batch(ContextEngine(), [void, played], config())
    assert batch.metrics["experts/hint/num_samples"] == 0
    assert batch.metrics["experts/hint/mixture_factor"] == 0
    assert batch.metrics["experts/iid/mixture_factor"] == 1
    assert [inputs_of(datum, "advantages") for datum in batch.data_D] == [[-0.5] * 3, [0.5] * 3]
    nothing = await make_batch(ContextEngine(), [void], config())
    assert (nothing.data_D, nothing.records) == ([], [])


async def test_credit_of_spans_is_trained_as_it_was_given():
    class Credited(Named):
        def credit(self):
            spans = [(0, 1.0), (1, 3.0)]
            return GroupCredit(
                spans=tuple(
                    SpanCredit(
                        seat=seat, transition=0, start=1, stop=2, stream="r", round_index=0, reward=reward
                    )
                    for seat, reward in spans
                ),
                weights={"r": 1.0},
            )

    group = outcome(Credited("self"), [drawn(BARE, [1, 2, 3])] * 2, [0.0, 0.0])
    batch = await make_batch(ContextEngine(), [group], config())
    assert [datum.loss_fn_inputs["advantages"].tolist() for datum in batch.data_D] == [[0, -1, 0], [0, 1, 0]]
    assert [datum.loss_fn_inputs["mask"].tolist() for datum in batch.data_D] == [[0, 1, 0]] * 2
    assert batch.metrics["experts/self/masked_token_share"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("has_spans", [True, False])
async def test_a_credited_seat_without_a_signal_counts_in_the_mixture_and_trains_nothing(has_spans):
    class Credited(Named):
        def __init__(self, rewards):
            super().__init__("self", weight=0.5)
            self.rewards = rewards

        def credit(self):
            place = {"transition": 0, "start": 1, "stop": 2, "stream": "r", "round_index": 0}
            given = [(s, r) for s, r in enumerate(self.rewards) if has_spans or any(self.rewards)]
            spans = tuple(SpanCredit(seat=seat, reward=reward, **place) for seat, reward in given)
            return GroupCredit(spans=spans, weights={"r": 1.0})

    rewards = [(0.0, 2.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]
    groups = [outcome(Credited(own), [drawn(BARE, [1, 2, 3])] * 2, own) for own in rewards]
    batch = await make_batch(ContextEngine(), [*groups, *(iid(weight=0.5) for _ in rewards)], config())
    for strategy in ("self", "iid"):
        assert batch.metrics[f"experts/{strategy}/num_samples"] == 8
        assert batch.metrics[f"experts/{strategy}/mixture_factor"] == 1.0
    assert batch.metrics["experts/self/reward_mean"] == 0.25
    assert batch.metrics["experts/self/zero_advantage_share"] == 0.75
    assert [inputs_of(datum, "advantages") for datum in batch.data_D[:2]] == [[-1.0], [1.0]]
    assert len(batch.data_D) == 2 + 8


async def test_a_seat_without_a_reward_is_no_sample_of_a_credited_strategy():
    class Credited(Named):
        def credit(self):
            place = {"transition": 0, "start": 1, "stop": 2, "stream": "r", "round_index": 0}
            spans = tuple(
                SpanCredit(seat=seat, reward=reward, **place) for seat, reward in enumerate((1.0, 2.0))
            )
            return GroupCredit(spans=spans, weights={"r": 1.0})

        def unpaid_seats(self):
            return frozenset({2})

    played = outcome(Credited("self"), [drawn(BARE, [1, 2, 3])] * 3, (1.0, 2.0, 0.0))
    batch = await make_batch(ContextEngine(), [played], config())
    assert batch.metrics["experts/self/num_samples"] == 2
    assert batch.metrics["experts/self/reward_mean"] == 1.5
    assert len(batch.data_D) == 2


@pytest.mark.parametrize(
    ("weights", "message"),
    [((1.0, 2.0, None), "has the weights 1.0 and 2.0"), ((1.0, 1.0, None), "'hint' has no mixture weight")],
)
async def test_weights_that_contradict_each_other_are_refused(weights, message):
    first, second, third = weights
    groups = [iid(weight=first), iid(weight=second), hint(weight=third)]
    with pytest.raises(ValueError, match=message):
        await make_batch(ContextEngine(), groups, config())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "best"}, "there is no estimator 'best'"),
        ({"estimator": "seq_tis", "baseline": "stratum"}, "seq_tis works with baseline weighted"),
        ({"estimator_options": {"gama": 1.0}}, "no option 'gama'"),
        ({"min_effective_share": 2.0}, "between 0 and 1"),
        ({"on_waste": "cry"}, "'warn' or 'stop'"),
        ({"num_checked": -1}, "num_checked must be 0 or more"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ExpertConfig(**options)


# in the loop


class IIDGroup(CountGroup):
    strategy_id = "iid"


class HintGroup(CountGroup):
    @property
    def strategy_id(self):
        return ("iid", "hint", "best")[self.prompt % 3]

    def context_transform(self, observation, turn):
        return tinker.ModelInput.from_ints([1]) if self.strategy_id == "hint" else observation


async def test_a_single_strategy_trains_as_the_loop_always_did(tmp_path):
    experts = ExpertConfig(estimator="importance_sampling")
    plain, named = make_run(tmp_path / "a"), make_run(tmp_path / "b", group_class=IIDGroup, experts=experts)
    assert await train(plain)
    assert await train(named)
    assert named.client.logits == pytest.approx(plain.client.logits)
    for one, other in zip(metrics_of(tmp_path / "a"), metrics_of(tmp_path / "b"), strict=True):
        for key in ("reward/mean", "test/good", "optim/loss", "advantage/std"):
            assert one.get(key) == pytest.approx(other.get(key))


async def test_samples_of_a_mixed_run_are_kept_and_read_back(tmp_path):
    assert await train(make_run(tmp_path, num_steps=2, group_class=HintGroup, experts=ExpertConfig()))
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["group"], row["seat"]) for row in rows] == [
        (step, group, seat) for step in range(2) for group in range(3) for seat in range(4)
    ]
    samples = [
        stored_sample({key: value for key, value in row.items() if key not in ("step", "group", "seat")})
        for row in rows
    ]
    assert Counter(sample.strategy for sample in samples) == {"iid": 8, "hint": 8, "best": 8}
    row = metrics_of(tmp_path)[0]
    assert row["experts/hint/num_samples"] == 4
    assert row["experts/iid/self_check"] < 1e-6
    assert 0 <= row["experts/hint/env/share"] <= 1
    assert "optim/entropy" in row


async def test_an_estimator_that_refuses_a_batch_ends_the_run_with_its_state_saved(tmp_path):
    experts = ExpertConfig(estimator="distill", estimator_options={"teacher": "nobody"})
    run = make_run(tmp_path, group_class=IIDGroup, experts=experts)
    with pytest.raises(EstimatorStoppedError, match="distill needs context_logprobs"):
        await train(run)
    assert run.folder.checkpoints.latest().next_step == 0


# which strategy gets which prompt


def order(groups_per_batch=4, num_groups=12):
    items = tuple(PromptItem(question=str(index)) for index in range(6))
    return PromptOrder(items=items, seed=1, groups_per_batch=groups_per_batch, num_groups=num_groups)


def factories(*names):
    return {name: lambda item, seed, name=name: (name, item.question, seed) for name in names}


def test_all_strategies_answer_every_prompt_with_seeds_of_their_own():
    dataset = MixtureDataset(order=order(), factories=factories("iid", "hint", "talk"))
    batch = dataset.get_batch(1)
    assert [name for name, _, _ in batch] == ["iid", "hint", "talk"] * 4
    assert [question for _, question, _ in batch] == [
        item.question for item in order().batch(1) for _ in range(3)
    ]
    assert len({seed for _, _, seed in batch}) == 12
    fewer = MixtureDataset(order=order(), factories=factories("iid", "talk")).get_batch(1)
    assert set(fewer) < set(batch)
    assert len(dataset) == 3


def test_prompts_are_dealt_out_in_turns():
    dataset = MixtureDataset(order=order(), factories=factories("iid", "hint", "talk"), assignment="split")
    groups = [group for index in range(3) for group in dataset.get_batch(index)]
    assert [name for name, _, _ in groups] == ["iid", "hint", "talk"] * 4
    with pytest.raises(ValueError, match="assignment must be 'all' or 'split'"):
        MixtureDataset(order=order(), factories=factories("iid"), assignment="some")
    with pytest.raises(ValueError, match="at least one strategy"):
        MixtureDataset(order=order(), factories={})
