"""Which tokens' weights were cut, at the very edge of each cut; and samples without a token."""

import math

import numpy as np
import pytest

from viva.experts.estimation import MAX_LOG_WEIGHT, capped_exp, estimate
from viva.experts.estimators import ESTIMATORS, make_estimator
from viva.experts.samples import Sample

OPTIONS = {"seq_is": {"force": True}, "distill": {"teacher": "hint"}, "token_tis": {"cap": math.e}}


def sampled(gaps_T, **options):
    """A hinted sample whose tokens the policy finds likelier by these nats."""
    gaps_T = np.array(gaps_T, dtype=np.float64)
    fields = {"strategy": "hint", "reward": 1.0, "sampling_logprobs_T": -gaps_T - 1.0}
    return Sample(**fields | {"old_logprobs_T": np.full(len(gaps_T), -1.0)} | options)


def own(num_tokens, teacher=-1.0):
    return Sample(
        strategy="iid",
        reward=0.0,
        sampling_logprobs_T=np.full(num_tokens, -1.0),
        on_policy=True,
        context_logprobs={"hint": np.full(num_tokens, teacher)},
    )


def made(name):
    return make_estimator(name, **OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_flags_of_cut_tokens_are_truth_values_of_every_token(name):
    batch = [own(3), sampled([0.1, 0.2], context_logprobs={"iid": np.full(2, -1.0)})]
    for sample, each in zip(batch, estimate(batch, made(name)), strict=True):
        assert each.clipped_T.dtype == np.bool_
        assert each.clipped_T.tolist() == [False] * len(sample)


def test_token_wise_a_token_is_cut_above_the_cap_and_not_at_it():
    estimator = make_estimator("token_tis", cap=math.e)
    (each,) = estimate([sampled([1.0, 1.0 + 1e-9, -5.0, 2.0])], estimator)
    assert each.clipped_T.tolist() == [False, True, False, True]
    assert each.weights_T == pytest.approx([math.e, math.e, math.exp(-5), math.e])


@pytest.mark.parametrize(
    ("gaps_T", "is_cut"), [([0.5, 0.5], False), ([0.5, 0.5 + 1e-9], True), ([3, 0], True)]
)
def test_sequence_wise_all_tokens_are_cut_or_none(gaps_T, is_cut):
    estimator = make_estimator("seq_tis", cap=math.e)
    (each,) = estimate([sampled(gaps_T)], estimator)
    assert each.clipped_T.tolist() == [is_cut] * 2
    assert each.weights_T == pytest.approx([math.e] * 2)


@pytest.mark.parametrize("name", ["seq_is", "balance"])
@pytest.mark.parametrize(("gap", "is_cut"), [(MAX_LOG_WEIGHT, False), (MAX_LOG_WEIGHT + 1, True)])
def test_weights_end_where_products_would_leave_float32(name, gap, is_cut):
    (each,) = estimate([sampled([gap - 1.0, 1.0])], made(name))
    assert each.clipped_T.tolist() == [is_cut] * 2
    assert each.weights_T == pytest.approx([math.exp(MAX_LOG_WEIGHT)] * 2)
    assert np.isfinite(np.float32(1e8) * each.weights_T.astype(np.float32)).all()


def test_an_exponential_ends_at_the_largest_weight():
    values = capped_exp(np.array([-math.inf, 0.0, MAX_LOG_WEIGHT, 1e9]))
    assert values.tolist() == [0.0, 1.0, math.exp(MAX_LOG_WEIGHT), math.exp(MAX_LOG_WEIGHT)]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_sample_without_a_token_has_no_signal_and_disturbs_nobody(name):
    empty = own(0)
    batch = [own(2, teacher=-0.5), sampled([0.1], context_logprobs={"iid": np.full(1, -1.0)})]
    *_, last = estimate([*batch, empty], made(name))
    assert last.advantage == 0.0
    assert last.advantages_T.shape == last.logprobs_T.shape == last.clipped_T.shape == (0,)


def test_the_advantage_told_is_the_mean_over_the_tokens_before_any_weight():
    sample = sampled([0.0, 2.0, 5.0], advantages_T=np.array([1.0, 2.0, 6.0]))
    for name in ("token_tis", "shaped", "seq_tis"):
        (each,) = estimate([sample], made(name))
        assert each.advantage == pytest.approx(3.0)
