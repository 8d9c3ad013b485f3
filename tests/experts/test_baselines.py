import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from viva.experts.estimation import Baseline, centred_rewards
from viva.experts.samples import Sample
from viva.rewards.credit import group_advantages

UNION = [Baseline.PROMPT_UNION, Baseline.WEIGHTED]
COMPARING = [Baseline.STRATUM, *UNION]

entry = st.tuples(
    st.sampled_from(["iid", "hint"]), st.integers(0, 1), st.floats(-10, 10, allow_nan=False), st.floats(0, 50)
)
batches = st.lists(entry, max_size=10)


def centre(batch, baseline):
    samples = [
        Sample(strategy=strategy, prompt=prompt, reward=reward, sampling_logprobs_T=np.zeros(1))
        for strategy, prompt, reward, _ in batch
    ]
    return centred_rewards(samples, [weight for *_, weight in batch], baseline)


def by_definition(batch, baseline):
    """The formula of the module, summed directly."""
    advantages = []
    for index, (stratum, prompt, reward, _) in enumerate(batch):
        members = [place for place, row in enumerate(batch) if row[1] == prompt]
        strata = {batch[place][0] for place in members}
        top = bottom = 0.0
        for name in strata:
            others = [place for place in members if batch[place][0] == name and place != index]
            size = len(others) + (name == stratum)
            weights = [batch[place][3] if baseline is Baseline.WEIGHTED else 1.0 for place in others]
            if others:
                top += size * np.dot(weights, [batch[place][2] for place in others]) / len(others)
                bottom += size * np.sum(weights) / len(others)
        advantages.append((reward - top / bottom) * (1 - 1 / len(members)) if bottom > 0 else None)
    return advantages


@given(batches, st.sampled_from(UNION))
def test_union_baselines_are_what_their_formula_says(batch, baseline):
    for found, wanted in zip(centre(batch, baseline), by_definition(batch, baseline), strict=True):
        assert wanted is None or found == pytest.approx(wanted, abs=1e-9)


@given(batches)
def test_the_stratum_baseline_is_the_ordinary_centring_of_groups(batch):
    found = centre(batch, Baseline.STRATUM)
    for key in {row[:2] for row in batch}:
        places = [place for place, row in enumerate(batch) if row[:2] == key]
        assert [found[place] for place in places] == group_advantages([batch[place][2] for place in places])


@given(batches, st.floats(0.1, 3), st.sampled_from(UNION))
def test_one_stratum_of_equal_weights_is_centred_as_always(batch, weight, baseline):
    alone = [("iid", 0, reward, weight) for _, _, reward, _ in batch]
    wanted = group_advantages([row[2] for row in alone])
    assert centre(alone, baseline) == pytest.approx(wanted, abs=1e-9)


@given(batches, st.sampled_from(COMPARING), st.randoms())
def test_permuting_the_samples_permutes_the_advantages(batch, baseline, random):
    order = list(range(len(batch)))
    random.shuffle(order)
    plain = centre(batch, baseline)
    permuted = centre([batch[index] for index in order], baseline)
    assert permuted == pytest.approx([plain[index] for index in order], abs=1e-9)


@given(batches, st.integers(-5, 5), st.sampled_from(COMPARING))
def test_a_shift_of_all_rewards_changes_nothing(batch, shift, baseline):
    shifted = [(strategy, prompt, reward + shift, weight) for strategy, prompt, reward, weight in batch]
    assert centre(shifted, baseline) == pytest.approx(centre(batch, baseline), abs=1e-8)


@given(batches, st.sampled_from(COMPARING))
def test_equal_rewards_give_exact_zeros(batch, baseline):
    equal = [(strategy, prompt, 0.1, weight) for strategy, prompt, _, weight in batch]
    assert centre(equal, baseline) == [0.0] * len(batch)


@given(batches, entry, st.sampled_from(COMPARING))
def test_a_prompt_does_not_touch_another(batch, extra, baseline):
    strategy, _, reward, weight = extra
    more = centre([*batch, (strategy, 7, reward, weight)], baseline)
    assert more[:-1] == centre(batch, baseline)
    assert more[-1] == 0.0


@given(batches, st.floats(0.01, 100))
def test_only_relative_weights_count(batch, scale):
    assume(all(weight == 0 or weight > 1e-6 for *_, weight in batch))
    scaled = [(*row[:3], row[3] * scale) for row in batch]
    assert centre(scaled, Baseline.WEIGHTED) == pytest.approx(centre(batch, Baseline.WEIGHTED), abs=1e-7)


def test_a_weight_beyond_all_others_does_not_wipe_them_out():
    batch = [("iid", 0, 1.0, 1e26), ("iid", 0, 0.0, 1.0), ("iid", 0, 1.0, 1.0)]
    assert centre(batch, Baseline.WEIGHTED)[0] == pytest.approx((1 - 0.5) * (1 - 1 / 3))


def test_others_that_weigh_nothing_are_compared_with_plainly():
    batch = [("hint", 0, 1.0, 5.0), ("hint", 0, 0.0, 0.0), ("hint", 0, 0.5, 0.0)]
    assert centre(batch, Baseline.WEIGHTED)[0] == pytest.approx((1 - 0.25) * (2 / 3))
