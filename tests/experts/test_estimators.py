import inspect
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import name as context_name
from making import sample_batches

from viva.experts.estimation import Baseline, Need, choose_baseline, estimate
from viva.experts.estimators import DEFAULT_ESTIMATOR, ESTIMATORS, make_estimator
from viva.experts.samples import Sample, context_gap

OPTIONS = {"seq_is": {"force": True}, "distill": {"teacher": "hint"}}
CORRECTING = ["token_tis", "shaped", "seq_tis", "seq_is", "balance"]


def make(name, **options):
    return make_estimator(name, **{**OPTIONS.get(name, {}), **options})


def usable(name, batch):
    return name != "distill" or any(sample.on_policy for sample in batch) or not batch


names = st.sampled_from(list(ESTIMATORS))


def same(first, second):
    np.testing.assert_allclose(first.advantages_T, second.advantages_T, rtol=1e-7, atol=1e-9)
    np.testing.assert_array_equal(first.logprobs_T, second.logprobs_T)


@given(sample_batches(), names)
def test_every_estimator_gives_one_finite_number_per_token_and_weights_that_are_not_negative(batch, name):
    if not usable(name, batch):
        return
    estimates = estimate(batch, make(name))
    assert len(estimates) == len(batch)
    for sample, each in zip(batch, estimates, strict=True):
        for values_T in (each.advantages_T, each.logprobs_T, each.weights_T, each.clipped_T):
            assert values_T.shape == (len(sample),)
            assert np.isfinite(values_T).all()
        assert (each.weights_T >= 0).all()
        assert math.isfinite(each.advantage)


@given(sample_batches(), names, st.randoms())
def test_permuting_the_batch_permutes_the_estimates(batch, name, random):
    if not usable(name, batch):
        return
    order = list(range(len(batch)))
    random.shuffle(order)
    plain = estimate(batch, make(name))
    permuted = estimate([batch[index] for index in order], make(name))
    for index, each in zip(order, permuted, strict=True):
        same(each, plain[index])


@given(sample_batches(), names)
def test_the_same_batch_gives_the_same_bits(batch, name):
    if not usable(name, batch):
        return
    first, second = estimate(batch, make(name)), estimate(list(batch), make(name))
    for one, other in zip(first, second, strict=True):
        assert one.advantages_T.tobytes() == other.advantages_T.tobytes()


@given(sample_batches(), names)
def test_only_importance_sampling_anchors_at_the_sampler(batch, name):
    if not usable(name, batch):
        return
    for sample, each in zip(batch, estimate(batch, make(name)), strict=True):
        anchor = sample.sampling_logprobs_T if name == "importance_sampling" else sample.old_T
        np.testing.assert_array_equal(each.logprobs_T, anchor)


@given(sample_batches(), st.sampled_from(CORRECTING))
def test_a_batch_drawn_under_the_training_context_alone_is_plain_policy_gradient(batch, name):
    batch = [sample for sample in batch if sample.on_policy]
    for sample, each in zip(batch, estimate(batch, make(name)), strict=True):
        np.testing.assert_allclose(each.weights_T, 1.0)
        np.testing.assert_allclose(each.advantages_T, each.advantage, atol=1e-12)
        np.testing.assert_array_equal(each.logprobs_T, sample.sampling_logprobs_T)


@given(sample_batches(), names, st.floats(0, 5), st.floats(0.1, 5))
def test_mixture_factors_scale_the_advantages_and_nothing_else(batch, name, hint, rest):
    mixture = {"iid": rest, "hint": hint, "feedback": rest}
    estimator = make(name)
    if not usable(name, batch) or estimator.combines_strategies:
        return
    plain, mixed = estimate(batch, estimator), estimate(batch, estimator, mixture=mixture)
    present = {sample.strategy for sample in batch}
    total = sum(mixture[strategy] for strategy in present)
    for sample, one, other in zip(batch, plain, mixed, strict=True):
        count = sum(each.strategy == sample.strategy for each in batch)
        factor = mixture[sample.strategy] / total * len(batch) / count if total > 0 else 0.0
        np.testing.assert_allclose(other.advantages_T, one.advantages_T * factor, rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(other.weights_T, one.weights_T)
        np.testing.assert_array_equal(other.logprobs_T, one.logprobs_T)


@given(sample_batches(), st.sampled_from(["importance_sampling", "none", *CORRECTING]))
def test_advantages_made_elsewhere_replace_reward_minus_baseline(batch, name):
    given_N = [
        replace(sample, advantages_T=np.arange(len(sample), dtype=float) - 1)
        for sample in batch
        if name != "balance" or sample.strategy != "feedback"
    ]
    for sample, each in zip(given_N, estimate(given_N, make(name)), strict=True):
        weights_T = 1.0 if name == "importance_sampling" else each.weights_T
        np.testing.assert_allclose(each.advantages_T, weights_T * (np.arange(len(sample)) - 1))


def hinted(gap_T, **changes):
    gap_T = np.array(gap_T, dtype=float)
    fields = {"strategy": "hint", "reward": 1.0, "sampling_logprobs_T": gap_T * 0 - 40} | changes
    return Sample(**fields, old_logprobs_T=gap_T - 40)


def weights_of(name, gap_T, **options):
    (found,) = make(name, **options).weights([hinted(gap_T)])
    return found


GAP = [math.log(3), math.log(0.5), math.log(0.1)]


def test_token_tis_cuts_each_ratio():
    found = weights_of("token_tis", GAP)
    np.testing.assert_allclose(found.weights_T, [2.0, 0.5, 0.1])
    assert found.clipped_T.tolist() == [True, False, False]


def test_shaped_bends_each_ratio():
    found = weights_of("shaped", GAP)
    np.testing.assert_allclose(found.weights_T, [3 / 3.1, 0.5 / 0.6, 0.1 / 0.2])


def test_sequence_estimators_weigh_the_whole_completion():
    np.testing.assert_allclose(weights_of("seq_is", GAP).weights_T, [0.15] * 3)
    np.testing.assert_allclose(weights_of("seq_tis", GAP).weights_T, [0.15] * 3)
    found = weights_of("seq_tis", [1.0, 1.0], cap=5.0)
    np.testing.assert_allclose(found.weights_T, [5.0, 5.0])
    assert found.clipped_T.all()


def test_none_and_importance_sampling_leave_weights_at_one_and_the_loss_makes_the_difference():
    sample = hinted(GAP, advantages_T=np.ones(3))
    (plain,) = estimate([sample], make("none"))
    (ratio,) = estimate([sample], make("importance_sampling"))
    np.testing.assert_array_equal(plain.advantages_T, ratio.advantages_T)
    np.testing.assert_allclose(plain.weights_T, [1, 1, 1])
    np.testing.assert_allclose(ratio.weights_T, [3, 0.5, 0.1])


def test_importance_sampling_needs_no_scoring_pass():
    sample = Sample(strategy="hint", reward=1.0, sampling_logprobs_T=np.array([-1.0, -2.0]))
    (found,) = estimate([sample], make("importance_sampling"))
    assert found.weights_T is None
    np.testing.assert_array_equal(found.logprobs_T, [-1.0, -2.0])


def test_positives_are_finished_successes():
    samples = [
        hinted([0.1], reward=1.0),
        hinted([0.1], reward=0.5),
        hinted([0.1], reward=0.0),
        hinted([0.1], reward=1.0, finished=False),
    ]
    assert [e.advantages_T.tolist() for e in estimate(samples, make("positives"))] == [[1], [1], [0], [0]]
    kept, left = (replace(samples[0], advantages_T=np.full(1, own)) for own in (1.0, 0.0))
    assert [e.advantages_T.tolist() for e in estimate([kept, left], make("positives"))] == [[1], [0]]
    strict = estimate(samples, make("positives", threshold=0.5))
    assert [e.advantages_T.tolist() for e in strict] == [[1], [0], [0], [0]]


def student(teacher_T, old_T, **changes):
    return Sample(
        strategy="iid",
        reward=0.0,
        on_policy=True,
        sampling_logprobs_T=np.array(old_T),
        context_logprobs={"hint": np.array(teacher_T)},
        **changes,
    )


def test_distill_pays_the_log_ratio_of_teacher_and_student_to_on_policy_samples_only():
    batch = [student([-1.0, -1.0, -4.0], [-2.0, -1.5, -1.0]), hinted([0.1])]
    token, idle = estimate(batch, make("distill"))
    np.testing.assert_allclose(token.advantages_T, [1.0, 0.5, -3.0])
    assert idle.advantages_T.tolist() == [0.0]
    doubled, _ = estimate(batch, make("distill", coefficient=2.0, horizon="return"))
    np.testing.assert_allclose(doubled.advantages_T, [-3.0, -5.0, -6.0])


def test_balance_weighs_against_everything_that_could_have_drawn_it():
    iid = student([math.log(0.9)], [math.log(0.1)])
    hint = Sample(
        strategy="hint",
        reward=1.0,
        sampling_logprobs_T=np.array([math.log(0.8)]),
        old_logprobs_T=np.array([math.log(0.2)]),
    )
    weights = [each.weights_T[0] for each in make("balance").weights([iid, hint, hint, hint])]
    assert weights[0] == pytest.approx(0.1 / (0.25 * 0.1 + 0.75 * 0.9))
    assert weights[1] == pytest.approx(0.2 / (0.25 * 0.2 + 0.75 * 0.8))


@given(sample_batches(min_size=1))
def test_balance_weights_never_exceed_one_over_the_on_policy_share(batch):
    for sample, weights in zip(batch, make("balance").weights(batch), strict=True):
        peers = [each for each in batch if each.prompt == sample.prompt]
        share = sum(each.on_policy for each in peers) / len(peers)
        if share:
            assert (weights.weights_T <= 1 / share * (1 + 1e-9)).all()


@given(sample_batches(max_size=4, max_tokens=2))
def test_balance_is_what_its_formula_says(batch):
    for sample, weights in zip(batch, make("balance").weights(batch), strict=True):
        peers = [each for each in batch if each.prompt == sample.prompt]
        mixture = 0.0
        for peer in peers:
            if peer.context_name == sample.context_name:
                scored = sample.sampling_logprobs_T
            else:
                scored = sample.old_T if peer.on_policy else sample.context_logprobs[peer.context_name]
            mixture += math.exp(min(scored.sum() - sample.old_T.sum(), 500)) / len(peers)
        wanted = min(1 / mixture if mixture > 0 else math.inf, math.exp(60))
        np.testing.assert_allclose(weights.weights_T, wanted, rtol=1e-6)


def test_a_context_that_cannot_say_a_token_is_no_problem_for_balance():
    batch = [student([-math.inf], [-1.0]), hinted([-1.0])]
    assert make("balance").weights(batch)[0].weights_T[0] == pytest.approx(2.0)


def test_each_realised_feedback_is_a_context_of_its_own():
    batch = [
        hinted([0.0], strategy="feedback", context="a", context_logprobs={"b": np.array([-39.0])}),
        hinted([0.0], strategy="feedback", context="b", context_logprobs={"a": np.array([-41.0])}),
    ]
    weights = [each.weights_T[0] for each in make("balance").weights(batch)]
    assert weights == pytest.approx([2 / (1 + math.e), 2 / (1 + 1 / math.e)])


def test_absurd_gaps_stay_finite_in_float32():
    sample = hinted([800.0, -800.0, 700.0], sampling_logprobs_T=np.full(3, -900.0))
    for name in ESTIMATORS:
        if name != "distill":
            (found,) = estimate([replace(sample, advantages_T=np.ones(3))], make(name))
            assert np.isfinite(found.advantages_T.astype(np.float32)).all()


# what is refused, and how


@pytest.mark.parametrize("name", [n for n, kind in ESTIMATORS.items() if Need.OLD_LOGPROBS in kind.needs])
def test_a_missing_scoring_pass_is_named(name):
    unscored = Sample(strategy="hint", reward=1.0, sampling_logprobs_T=np.array([-1.0]))
    batch = [hinted([0.1], context="c", context_logprobs={"hint": np.array([-1.0])}), unscored]
    with pytest.raises(ValueError, match=rf"{name} needs old_logprobs_T; sample 1 \(strategy 'hint'\)"):
        estimate(batch, make(name))
    with pytest.raises(ValueError, match="strategy 'hint' has no old_logprobs_T"):
        context_gap(unscored)


def test_a_missing_context_is_named():
    batch = [hinted([0.1]), hinted([0.1], strategy="talk")]
    with pytest.raises(ValueError, match=r"sample 0 .*'hint'.* has no score under 'talk'"):
        estimate(batch, make("balance"))
    with pytest.raises(ValueError, match=r"distill needs context_logprobs\['talk'\]; sample 0"):
        estimate([student([-1.0], [-1.0])], make("distill", teacher="talk"))


def test_distill_refuses_a_batch_without_own_samples_and_a_truncated_teacher():
    with pytest.raises(ValueError, match="add the iid strategy"):
        estimate([hinted([0.1])], make("distill"))
    with pytest.raises(ValueError, match="probability 0"):
        estimate([student([-math.inf], [-1.0])], make("distill"))


def test_seq_is_refuses_a_large_gap_unless_forced():
    batch = [hinted([-1.5, -1.5])]
    with pytest.raises(ValueError, match=r"'hint' has a mean context gap of 3.00 nats, at most 2.0"):
        estimate(batch, make_estimator("seq_is"))
    assert estimate(batch, make_estimator("seq_is", force=True))
    assert estimate(batch, make_estimator("seq_is", max_gap=3.0))


@pytest.mark.parametrize(("gaps", "mean"), [((0.0, 0.5, 5.0), None), ((0.0, 1.0, 5.5), 13 / 6)])
def test_seq_is_looks_at_the_mean_gap_of_a_strategy_and_at_no_single_sample(gaps, mean):
    batch = [hinted([-gap / 2, -gap / 2]) for gap in gaps]
    assert max(gaps) > 2 > min(gaps)
    if mean is None:
        assert len(estimate(batch, make_estimator("seq_is"))) == len(gaps)
        return
    with pytest.raises(ValueError, match=f"a mean context gap of {mean:.2f} nats"):
        estimate(batch, make_estimator("seq_is"))


def test_mixture_weights_on_top_of_balance_are_refused():
    with pytest.raises(ValueError, match="weighs the strategies itself"):
        estimate([hinted([0.1])], make("balance"), mixture={"hint": 1.0})


@pytest.mark.parametrize(
    ("name", "baseline", "allowed"),
    [
        ("seq_tis", "stratum", "weighted"),
        ("balance", "stratum", "weighted or prompt_union"),
        ("none", "weighted", "stratum or prompt_union"),
        ("positives", "stratum", "none"),
        ("token_tis", "mean", "stratum or prompt_union or weighted"),
    ],
)
def test_a_baseline_that_does_not_go_with_an_estimator_is_refused(name, baseline, allowed):
    with pytest.raises(ValueError, match=rf"{name} works with baseline .*{allowed}.*; got '{baseline}'"):
        choose_baseline(make(name), baseline)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_first_baseline_is_the_default_and_all_can_be_asked_for_by_name(name):
    estimator = make(name)
    assert choose_baseline(estimator, None) is estimator.baselines[0]
    for baseline in estimator.baselines:
        assert choose_baseline(estimator, str(baseline)) is Baseline(baseline)


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("sequence", {}, "no estimator 'sequence'; choose from importance_sampling, token_tis"),
        ("token_tis", {"clip": 1.0}, "token_tis has no option 'clip'; it has the options cap"),
        ("none", {"cap": 1.0}, "none has no option 'cap'; it has no options"),
        ("distill", {}, "distill needs the option 'teacher'"),
        ("token_tis", {"cap": 0.5}, "cap must be a finite number of 1 or more; got 0.5"),
        ("seq_tis", {"cap": math.inf}, "cap must be a finite number of 1 or more; got inf"),
        ("shaped", {"gamma": 0.0}, "gamma must be a positive finite number; got 0.0"),
        ("seq_is", {"max_gap": 0.0}, "max_gap must be positive"),
        ("positives", {"threshold": math.nan}, "threshold must be a finite number; got nan"),
        ("distill", {"teacher": "hint", "coefficient": -1.0}, "coefficient must be a positive finite"),
        ("distill", {"teacher": "hint", "horizon": "all"}, "must be 'token' or 'return'; got 'all'"),
    ],
)
def test_names_and_options_that_make_no_sense_are_refused(name, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_estimator(name, **options)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"reward": math.nan}, "'hint' has reward nan"),
        (
            {"sampling_logprobs_T": np.zeros((1, 2))},
            r"sampling_logprobs_T must be one number per token.*\(1, 2\)",
        ),
        ({"sampling_logprobs_T": np.array([-math.inf])}, "sampling_logprobs_T must hold finite numbers"),
        ({"old_logprobs_T": np.zeros(2)}, r"old_logprobs_T must be 1 numbers, one per token.*\(2,\)"),
        ({"advantages_T": np.array([math.nan])}, "advantages_T must hold finite numbers"),
        ({"context_logprobs": {"talk": np.array([math.inf])}}, r"context_logprobs\['talk'\] must hold"),
    ],
)
def test_samples_with_impossible_values_are_refused(changes, complaint):
    fields = {"strategy": "hint", "reward": 1.0, "sampling_logprobs_T": np.zeros(1)}
    with pytest.raises(ValueError, match=complaint):
        Sample(**(fields | changes))


def test_a_sample_keeps_its_own_copy():
    values = np.array([-1.0])
    sample = Sample(strategy="iid", reward=0.0, sampling_logprobs_T=values, on_policy=True)
    values[0] = -9.0
    assert sample.sampling_logprobs_T.tolist() == [-1.0]
    with pytest.raises(ValueError, match="read-only"):
        sample.sampling_logprobs_T[0] = 0.0


# the registry and its neighbours


def test_the_registry_holds_every_estimator_under_its_name():
    assert len(ESTIMATORS) == len(set(ESTIMATORS.values())) == 9
    for name, kind in ESTIMATORS.items():
        assert kind.name == name
        assert inspect.getdoc(kind)
    assert DEFAULT_ESTIMATOR in ESTIMATORS


def test_names_in_the_making_of_batches_agree():
    assert context_name("hint", 3) == "hint"
    assert context_name("feedback", 3) == "feedback 3"
