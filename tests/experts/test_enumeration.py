"""Exact expectations over every completion of a small policy: who is unbiased, and what the others do."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from _tabular import Problem, Table, coefficients_T, make_problem

from viva.experts.estimation import Baseline, estimate
from viva.experts.estimators import ESTIMATORS, make_estimator
from viva.experts.samples import Sample

OPTIONS = {"seq_is": {"force": True}, "distill": {"teacher": "hint", "horizon": "return"}}
UNBIASED = [name for name, kind in ESTIMATORS.items() if kind.is_unbiased]
BIASED = ["importance_sampling", "token_tis", "none", "positives", "shaped", "seq_tis"]


def make(name):
    return make_estimator(name, **OPTIONS.get(name, {}))


def expected_gradient(
    problem: Problem, name: str, constant: float = 0.0, strategies=("iid", "hint"), **choices
):
    """Of one sample of each strategy, with a constant in the place of the baseline; the mean of the two."""
    samples = [
        replace(sample, advantages_T=np.full(len(sample), sample.reward - constant))
        for strategy in strategies
        for sample in problem.samples[strategy]
    ]
    drawn = np.concatenate([problem.drawn_from(strategy) for strategy in strategies])
    estimates = estimate(samples, make(name), **choices)
    factors = np.stack([coefficients_T(s, each) for s, each in zip(samples, estimates, strict=True)])
    scores = np.concatenate([problem.policy.scores_Y_T_D] * len(strategies))
    return np.einsum("y,yt,ytd->td", drawn, factors, scores) / len(strategies)


def distance(first, second):
    return float(np.abs(first - second).max())


def numeric_gradient(value, logits, step=1e-5):
    gradient = np.zeros_like(logits)
    for index in np.ndindex(*logits.shape):
        up, down = logits.copy(), logits.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (value(up) - value(down)) / (2 * step)
    return gradient.reshape(logits.shape[0], -1)


@pytest.fixture(scope="module")
def large() -> Problem:
    return make_problem(3, gap=1.5, style=True)


@pytest.fixture(scope="module")
def small() -> Problem:
    return make_problem(
        1, gap=0.4, style=False, length=3, num_content=3, num_symbols=2, memory=2, num_right=2
    )


def test_the_true_gradient_is_that_of_expected_reward(small):
    def value(logits):
        return Table(logits=logits, memory=2).probabilities_Y @ small.rewards_Y

    assert distance(small.true_gradient, numeric_gradient(value, small.policy.logits)) < 1e-9


@pytest.mark.parametrize("constant", [0.0, -3.0])
@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased_estimators_give_the_true_gradient_of_2187_completions(large, name, constant):
    assert len(large.rewards_Y) == 3**7
    assert distance(expected_gradient(large, name, constant), large.true_gradient) < 1e-10


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize("gap", [0.1, 1.0, 3.0])
def test_unbiased_means_at_every_gap_and_with_a_table_for_every_prefix(name, gap):
    problem = make_problem(5, gap=gap, style=True, length=4, num_content=3, memory=3, num_right=2)
    assert distance(expected_gradient(problem, name, 0.3), problem.true_gradient) < 1e-10


def test_exactly_these_claim_to_be_unbiased():
    assert sorted(UNBIASED) == ["balance", "seq_is"]


@pytest.mark.parametrize("name", BIASED)
def test_the_others_are_biased_at_a_gap(large, name):
    found, truth = expected_gradient(large, name), large.true_gradient
    cosine = (found * truth).sum() / np.linalg.norm(found) / np.linalg.norm(truth)
    assert cosine < 1 - 1e-4


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in ("positives", "distill")])
def test_without_a_gap_all_correct_themselves_to_the_policy_gradient(small, name):
    no_gap = Problem(policy=small.policy, hinted=small.policy, rewards_Y=small.rewards_Y, num_content=3)
    strategies = ("iid", "hint")
    if name == "shaped":  # its shape has the value 1 / (1 + gamma) at a ratio of 1
        strategies = ("iid",)
    assert distance(expected_gradient(no_gap, name, strategies=strategies), small.true_gradient) < 1e-12


def expected_batch_gradient(
    problem: Problem, name: str, sizes: dict[str, int], baseline: Baseline, **choices
):
    """Of whole batches with the baseline that the library computes from each; every batch is visited."""
    num = len(problem.rewards_Y)
    strategies = [strategy for strategy, size in sizes.items() for _ in range(size)]
    total = np.zeros_like(problem.true_gradient)
    estimator = make(name)
    for batch in itertools.product(range(num), repeat=len(strategies)):
        samples = [problem.samples[s][index] for s, index in zip(strategies, batch, strict=True)]
        chance = np.prod([problem.drawn_from(s)[index] for s, index in zip(strategies, batch, strict=True)])
        for index, sample, each in zip(
            batch, samples, estimate(samples, estimator, baseline=baseline, **choices), strict=True
        ):
            total += chance * coefficients_T(sample, each)[:, None] * problem.policy.scores_Y_T_D[index]
    return total


@pytest.fixture(scope="module")
def tiny() -> Problem:
    return make_problem(
        2, gap=0.5, style=False, length=2, num_content=2, num_symbols=2, memory=1, num_right=1
    )


SIZES = {"iid": 2, "hint": 2}


@pytest.mark.parametrize(
    ("name", "baseline", "factor"),
    [
        ("seq_is", Baseline.STRATUM, 2 * (1 - 1 / 2) * 2),
        ("seq_is", Baseline.PROMPT_UNION, 4 * (1 - 1 / 4)),
        ("seq_is", Baseline.WEIGHTED, 4 * (1 - 1 / 4)),
        ("balance", Baseline.PROMPT_UNION, 4 * (1 - 1 / 4)),
    ],
)
def test_baselines_from_the_batch_itself_add_no_bias(tiny, name, baseline, factor):
    found = expected_batch_gradient(tiny, name, SIZES, baseline)
    assert distance(found, factor * tiny.true_gradient) < 1e-10


def test_the_weighted_baseline_of_balance_is_biased_by_less_than_a_tenth_of_the_gradient(tiny):
    found = expected_batch_gradient(tiny, "balance", SIZES, Baseline.WEIGHTED) / (4 * (1 - 1 / 4))
    bias = distance(found, tiny.true_gradient) / np.abs(tiny.true_gradient).max()
    assert 1e-10 < bias < 0.1


def test_a_plain_mean_of_the_prompt_would_have_biased_balance(tiny):
    """Why the union baselines leave the sample out by strata: the house's first thought, spelled out."""
    num = len(tiny.rewards_Y)
    total = np.zeros_like(tiny.true_gradient)
    strategies = [strategy for strategy, size in SIZES.items() for _ in range(size)]
    for batch in itertools.product(range(num), repeat=4):
        samples = [tiny.samples[s][index] for s, index in zip(strategies, batch, strict=True)]
        chance = np.prod([tiny.drawn_from(s)[index] for s, index in zip(strategies, batch, strict=True)])
        mean = np.mean([sample.reward for sample in samples])
        weights = make("balance").weights(samples)
        for index, sample, weight in zip(batch, samples, weights, strict=True):
            factor = chance * weight.weights_T[0] * (sample.reward - mean)
            total += factor * tiny.policy.scores_Y_T_D[index].reshape(total.shape)
    assert distance(total, 4 * (1 - 1 / 4) * tiny.true_gradient) > 1e-3


@pytest.mark.parametrize("hint_weight", [0.0, 0.2, 0.9])
def test_mixture_weights_keep_sequence_ratios_unbiased_and_the_step_as_long(small, hint_weight):
    mixture = {"iid": 1 - hint_weight, "hint": hint_weight}
    found = expected_gradient(small, "seq_is", 0.2, mixture=mixture)
    assert distance(found, small.true_gradient) < 1e-10


def test_balance_is_unbiased_over_contexts_that_were_themselves_sampled(small):
    """Feedback: one realised context per sample, each with one draw; conditional on them nothing is biased."""
    rng = np.random.default_rng(0)
    tables = {
        f"feedback {k}": Table(
            logits=small.policy.logits + 0.7 * rng.normal(size=small.policy.logits.shape), memory=2
        )
        for k in range(3)
    }
    plain_Y_T = small.policy.logprobs_Y_T
    found = np.zeros_like(small.true_gradient)
    for context, table in tables.items():
        for index, reward in enumerate(small.rewards_Y):
            others = {name: t.logprobs_Y_T[index] for name, t in tables.items() if name != context}
            one = Sample(
                strategy="feedback",
                context=context,
                reward=reward,
                sampling_logprobs_T=table.logprobs_Y_T[index],
                old_logprobs_T=plain_Y_T[index],
                context_logprobs=others,
            )
            company = [
                replace(
                    one,
                    context=name,
                    context_logprobs=tables_without(tables, name, index),
                    sampling_logprobs_T=tables[name].logprobs_Y_T[index],
                )
                for name in others
            ]
            weight = make("balance").weights([one, *company])[0].weights_T[0]
            chance = table.probabilities_Y[index]
            found += chance * weight * (reward - 0.4) * small.policy.scores_Y_T_D[index]
    assert distance(found / 3, small.true_gradient) < 1e-10


def tables_without(tables, left_out, index):
    return {name: table.logprobs_Y_T[index] for name, table in tables.items() if name != left_out}


def test_distill_with_returns_follows_the_gradient_of_the_reverse_divergence(small):
    def value(logits):
        student = Table(logits=logits, memory=2)
        difference = (student.logprobs_Y_T - small.hinted.logprobs_Y_T).sum(axis=1)
        return -float(student.probabilities_Y @ difference)

    found = expected_gradient(small, "distill", strategies=("iid",))
    assert distance(found, numeric_gradient(value, small.policy.logits)) < 1e-8


def test_clipping_the_whole_ratio_learns_the_style_that_ratios_alone_do_not(large):
    """PPO's clip on p_train / q: what the hint made likely has a small ratio, so its failures are dropped."""
    from estimators import ppo_clip

    pool, drawn = large.samples["hint"], large.drawn_from("hint")
    mean_reward = drawn @ large.rewards_Y
    ratios = np.exp(np.stack([s.old_logprobs_T - s.sampling_logprobs_T for s in pool]))
    factors = ratios * (large.rewards_Y - mean_reward)[:, None]
    is_negative = factors < 0

    def artefact(kept):
        mean = np.einsum("y,yt,ytd->td", drawn, kept, large.policy.scores_Y_T_D)
        return np.square(mean[large.num_content :]).sum() / np.square(mean).sum()

    clipped = ppo_clip(factors, ratios)
    kept_negative = drawn @ (is_negative & (clipped != 0)).sum(axis=1) / (drawn @ is_negative.sum(axis=1))
    kept_positive = drawn @ ((factors > 0) & (clipped != 0)).sum(axis=1) / (drawn @ (factors > 0).sum(axis=1))
    assert artefact(factors) < 0.001
    assert artefact(clipped) > 0.05
    assert kept_negative < kept_positive
