import math
import re
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import sample_batches

from viva.experts.diagnostics import (
    check_diagnostics,
    clustered_stderr,
    diagnose,
    effective_sample_size,
    flat_metrics,
    mixes_units,
    recommend,
)
from viva.experts.estimation import estimate
from viva.experts.estimators import DEFAULT_ESTIMATOR, ESTIMATORS, make_estimator
from viva.experts.samples import Sample


def make(name):
    options = {"seq_is": {"force": True}, "distill": {"teacher": "hint"}}
    return make_estimator(name, **options.get(name, {}))


weights = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=20).map(np.array)


@given(weights)
def test_the_effective_sample_size_is_a_share(values):
    assert 0 <= effective_sample_size(values) <= 1 + 1e-12


@given(weights, st.floats(1e-3, 1e3))
def test_the_effective_sample_size_does_not_depend_on_scale(values, scale):
    assert effective_sample_size(values * scale) == pytest.approx(effective_sample_size(values))


@given(st.floats(1e-300, 1e300), st.integers(1, 20))
def test_equal_weights_are_worth_all_samples_and_a_single_one_is_worth_one(weight, count):
    assert effective_sample_size(np.full(count, weight)) == pytest.approx(1)
    assert effective_sample_size(np.eye(count)[0] * weight) == pytest.approx(1 / count)


def test_weights_of_zero_and_no_weights_are_worth_nothing():
    assert effective_sample_size(np.zeros(3)) == 0
    assert effective_sample_size(np.zeros(0)) == 0


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=8))
def test_the_standard_error_of_single_values_is_the_textbooks(values):
    error = clustered_stderr([[value] for value in values])
    assert error == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)), abs=1e-12)
    assert clustered_stderr([[value] * 3 for value in values]) == pytest.approx(error, abs=1e-12)


def test_the_standard_error_is_that_of_means_of_independent_prompts():
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(400):
        clusters = [prompt + rng.normal(size=4) for prompt in rng.normal(size=30)]
        means.append(np.mean(clusters))
        errors.append(clustered_stderr(clusters))
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(means), rel=0.1)
    assert clustered_stderr([[1.0, 2.0]]) is None
    assert clustered_stderr([[1.0, 2.0], []]) is None


@given(sample_batches(), st.sampled_from(list(ESTIMATORS)))
def test_every_batch_can_be_diagnosed_and_every_figure_is_finite(batch, name):
    if name == "distill" and not any(sample.on_policy for sample in batch):
        return
    found = diagnose(batch, estimate(batch, make(name)))
    assert list(found) == sorted({sample.strategy for sample in batch})
    assert sum(figures.num_samples for figures in found.values()) == len(batch)
    for key, value in flat_metrics(found).items():
        assert key.startswith("experts/")
        assert math.isfinite(value)
    for figures in found.values():
        shares = [figures.zero_advantage_share, figures.finish_rate, figures.clipped_share]
        assert all(0 <= share <= 1 for share in shares)


@given(sample_batches(), st.randoms())
def test_the_order_of_samples_does_not_matter(batch, random):
    shuffled = list(batch)
    random.shuffle(shuffled)
    first = flat_metrics(diagnose(batch, estimate(batch, make("token_tis"))))
    second = flat_metrics(diagnose(shuffled, estimate(shuffled, make("token_tis"))))
    assert second == pytest.approx(first, rel=1e-6, abs=1e-9)


def sample(strategy, gap_T, **changes):
    gap_T = np.array(gap_T, dtype=float)
    fields = {
        "strategy": strategy,
        "reward": 1.0,
        "sampling_logprobs_T": gap_T * 0 - 5,
        "old_logprobs_T": gap_T - 5,
        "on_policy": strategy == "iid",
        "context_logprobs": {"hint": gap_T * 0 - 5},
    }
    return Sample(**(fields | changes))


def test_the_figures_are_those_one_computes_by_hand():
    batch = [
        sample("hint", [math.log(4), math.log(0.5)], reward=1.0),
        sample("hint", [math.log(0.25)], reward=0.0, finished=False),
        sample("iid", [0.0, 0.0], reward=1.0, checked_logprobs_T=np.array([-4.99, -5.01])),
    ]
    found = diagnose(batch, estimate(batch, make("token_tis"), baseline="stratum"))
    hint = found["hint"]
    assert (hint.num_samples, hint.num_tokens) == (2, 3)
    assert hint.reward_mean == 0.5
    assert hint.reward_mean_stderr is None  # they are all of one prompt
    assert hint.zero_advantage_share == 0
    assert hint.finish_rate == 0.5
    assert hint.clipped_share == pytest.approx(1 / 3)
    assert hint.weight_mean == pytest.approx(2.75 / 3)
    assert hint.effective_sample_size == pytest.approx(2.75**2 / (3 * (4 + 0.25 + 0.0625)))
    assert hint.largest_weight_share == pytest.approx(2.5 / 2.75)
    assert hint.total_gap_mean == pytest.approx((math.log(2) + math.log(0.25)) / 2)
    assert hint.total_gap_quantiles[1] == pytest.approx(hint.total_gap_mean)
    assert hint.token_gap_mean == pytest.approx(math.log(0.5) / 3)
    assert hint.hint_reliance == pytest.approx(math.log(2) / 2)
    assert hint.self_check is None
    iid = found["iid"]
    assert iid.zero_advantage_share == 1
    assert iid.hint_reliance is None
    assert iid.self_check == pytest.approx(0.01)
    metrics = flat_metrics(found)
    assert metrics["experts/hint/total_gap_p50"] == pytest.approx(hint.total_gap_mean)
    assert "experts/iid/hint_reliance" not in metrics


def test_without_a_scoring_pass_ratios_are_unknown_and_the_rest_is_there():
    batch = [Sample(strategy="hint", reward=1.0, sampling_logprobs_T=np.array([-1.0]))]
    figures = diagnose(batch, estimate(batch, make("importance_sampling")))["hint"]
    assert figures.effective_sample_size is None
    assert figures.token_gap_mean is None
    assert sorted(figures.metrics()) == [
        "clipped_share",
        "finish_rate",
        "num_samples",
        "num_tokens",
        "reward_mean",
        "zero_advantage_share",
    ]


def test_a_batch_and_estimates_of_different_length_are_refused():
    with pytest.raises(ValueError, match="one estimate per sample; got 0 for 1 samples"):
        diagnose([sample("iid", [0.0])], [])


# guard and recommendation


def test_own_samples_need_no_correction():
    assert recommend([sample("iid", [0.0])]).estimator == "importance_sampling"
    assert recommend([]).estimator == "importance_sampling"


def test_balance_is_recommended_while_the_hinted_samples_count_under_it():
    batch = [sample("iid", [0.0, 0.0]), sample("hint", [-0.5, 0.2])]
    found = recommend(batch)
    assert found.estimator == "balance"
    assert "'hint' (mean weight" in found.reason


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ([sample("iid", [0.0]), sample("hint", [-9.0])], "'hint' .* would count for next to nothing"),
        ([sample("hint", [-0.5])], "no on-policy samples"),
        ([sample("iid", [0.0], context_logprobs={}), sample("hint", [-0.5])], "no score under 'hint'"),
        (
            [sample("iid", [0.0]), replace(sample("hint", [0.0]), old_logprobs_T=None)],
            "needs old_logprobs_T",
        ),
    ],
)
def test_otherwise_the_default_is_recommended_with_the_reason(batch, reason):
    found = recommend(batch)
    assert found.estimator == DEFAULT_ESTIMATOR
    assert re.search(reason, found.reason)


def test_strata_of_equal_rewards_are_compared_with_the_rest_of_their_prompt():
    own, hints = sample("iid", [0.0], reward=0.0), [sample("hint", [-9.0], reward=r) for r in (1.0, 1.0, 0.0)]
    assert recommend([own, *hints]).baseline == "stratum"
    assert recommend([own, *hints[:2]]).baseline == "prompt_union"
    assert "of their stratum" in recommend([own, *hints[:2]]).reason


def test_mixed_units_are_advised_a_baseline_per_strategy():
    own, hints = sample("iid", [0.0], reward=0.0), [sample("hint", [-0.1], reward=1.0)] * 2
    assert (recommend([own, *hints]).estimator, recommend([own, *hints]).baseline) == ("balance", "weighted")
    found = recommend([own, *hints], mixed_units=True)
    assert (found.estimator, found.baseline) == (DEFAULT_ESTIMATOR, "stratum")
    assert mixes_units(["iid", "conversation"], "own")
    assert not mixes_units(["iid", "conversation"], "verifier")
    assert not mixes_units(["conversation"], "own")


@given(sample_batches(), st.booleans())
def test_what_is_recommended_can_be_used(batch, are_scored):
    batch = batch if are_scored else [replace(each, context_logprobs={}) for each in batch]
    found = recommend(batch)
    estimate(batch, make(found.estimator), baseline=found.baseline)


def collapsed():
    return [sample("hint", [gap]) for gap in [-9.0] * 30 + [4.0]] + [sample("iid", [0.0])]


def texts(batch, name, **options):
    found = diagnose(batch, estimate(batch, make(name)))
    return check_diagnostics(found, estimator=name, recommendation=recommend(batch), **options)


def test_a_collapsed_strategy_is_told_with_the_estimator_to_use_instead():
    (text,) = texts(collapsed(), "seq_is")
    assert text.startswith("strategy 'hint': the effective sample size under seq_is is 0.03")
    assert f"use {recommend(collapsed()).estimator} with baseline " in text


def test_a_strategy_that_weighs_nothing_is_told_although_its_weights_are_equal():
    batch = [sample("iid", [0.0]), sample("hint", [-9.0]), sample("hint", [-9.0])]
    (text,) = texts(batch, "balance")
    assert "'hint': its samples weigh 0.0" in text
    assert f"use {DEFAULT_ESTIMATOR}" in text


def test_the_recommended_estimator_itself_gets_other_advice():
    batch = [sample("hint", [gap]) for gap in [-30.0] * 30 + [0.0]]
    found = diagnose(batch, estimate(batch, make(DEFAULT_ESTIMATOR)))
    complaints = check_diagnostics(
        found, estimator=recommend(batch).estimator, recommendation=recommend(batch), minimum=1.0
    )
    assert all("weaken the hint" in text for text in complaints)


@given(sample_batches(), st.sampled_from(["token_tis", "seq_is", "none", "importance_sampling"]))
def test_a_minimum_of_zero_lets_everything_pass(batch, name):
    assert texts(batch, name, minimum=0.0) == []
