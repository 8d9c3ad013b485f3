"""A stored batch is the batch: the same samples, so the same estimates."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from making import sample_batches

from viva.experts.estimation import estimate
from viva.experts.estimators import make_estimator
from viva.experts.samples import Sample, sample_record, stored_sample


def through_a_file(sample):
    text = json.dumps(sample_record(sample, prompt=sample.prompt), allow_nan=False)
    return stored_sample(json.loads(text))


@settings(deadline=None)
@given(sample_batches())
def test_a_sample_survives_storing_to_the_last_bit(samples_N):
    for sample in samples_N:
        again = through_a_file(sample)
        for name in ("strategy", "prompt", "reward", "on_policy", "context", "finished"):
            assert getattr(again, name) == getattr(sample, name)
        assert np.array_equal(again.sampling_logprobs_T, sample.sampling_logprobs_T)
        assert np.array_equal(again.old_T, sample.old_T)
        assert again.context_logprobs.keys() == sample.context_logprobs.keys()


@settings(deadline=None)
@given(sample_batches(min_size=1))
def test_a_stored_batch_is_estimated_as_it_was(samples_N):
    again_N = [through_a_file(sample) for sample in samples_N]
    for name in ("shaped", "balance", "positives"):
        pairs = zip(*(estimate(batch, make_estimator(name)) for batch in (samples_N, again_N)), strict=True)
        for before, after in pairs:
            assert np.array_equal(before.advantages_T, after.advantages_T)
            assert np.array_equal(before.logprobs_T, after.logprobs_T)


def test_a_token_that_a_context_cannot_say_stays_so():
    sample = Sample(
        strategy="iid",
        reward=1.0,
        sampling_logprobs_T=np.array([-1.0]),
        context_logprobs={"hint": np.array([-np.inf])},
        advantages_T=np.array([0.5]),
    )
    again = through_a_file(sample)
    assert again.context_logprobs["hint"] == -np.inf
    assert again.advantages_T == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": "much"}, "damaged 'reward'"),
        ({"sampling_logprobs": [1, "x"]}, "damaged 'sampling_logprobs.1"),
        ({"banana": 1}, "damaged 'banana'"),
        ({"old_logprobs": [-1.0, -1.0]}, "old_logprobs_T must be 1 numbers"),
        ({"sampling_logprobs": [None]}, "must hold finite numbers"),
    ],
)
def test_a_damaged_sample_is_named(change, message):
    sample = Sample(strategy="iid", reward=1.0, sampling_logprobs_T=np.array([-1.0]))
    with pytest.raises(ValueError, match=message):
        stored_sample(sample_record(sample, prompt=0) | change)
