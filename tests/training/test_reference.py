"""The KL penalty: the gradient that it adds, the tokens that have it, and where a policy comes to rest under it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tinker
from bandit_engine import GOOD, VOCABULARY, BanditSampler, CountDataset, Done, log_softmax
from bandit_runs import make_run, metrics_of
from context_engine import ContextEngine, config, hint, iid
from credited_groups import Credited
from expert_making import Group, outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_cookbook.rl.metrics import incorporate_kl_penalty
from tinker_cookbook.rl.types import Trajectory
from transitions import transition

from viva.judging.judge import PolicyRef
from viva.rewards.credit import GroupCredit, SpanCredit
from viva.training.batch import make_batch, plain_batch
from viva.training.data_processing import action_values
from viva.training.loop import train
from viva.training.reference import KlPenalty, penalised


def penalty_to(logprobs, coef=1.0):
    """To a policy that gives each token its logprob wherever it stands."""
    return KlPenalty(coef=coef, reference=PolicyRef(sampling_client=BanditSampler(np.asarray(logprobs))))


def one_token_each(logprobs, rewards):
    """A group with every token of the vocabulary once."""
    drawn = [
        Trajectory([transition([1], [token], logprobs=[float(logprob)])], tinker.ModelInput.empty())
        for token, logprob in enumerate(logprobs)
    ]
    return outcome(Group(), drawn, rewards)


async def advantages_of(batch):
    return np.concatenate([action_values(datum, "advantages") for datum in batch.data_D])


LOGITS = st.lists(st.floats(-2, 2), min_size=VOCABULARY, max_size=VOCABULARY).map(np.array)


@given(own=LOGITS, other=LOGITS, coef=st.floats(0.01, 3))
@settings(deadline=None, max_examples=25)
async def test_the_expected_gradient_is_that_of_the_kl_divergence(own, other, coef):
    def divergence(logits):
        return np.exp(log_softmax(logits)) @ (log_softmax(logits) - log_softmax(other))

    group = one_token_each(log_softmax(own), [0.0] * VOCABULARY)
    batch = await penalised(plain_batch([group], keeps_silent=True), penalty_to(other, coef))
    probabilities = np.exp(log_softmax(own))
    scores = np.eye(VOCABULARY) - probabilities  # of each token, by logit
    found = (probabilities * await advantages_of(batch)) @ scores
    steps = 1e-5 * np.eye(VOCABULARY)
    wanted = [(divergence(own + step) - divergence(own - step)) / 2e-5 for step in steps]
    assert found == pytest.approx(-coef * np.array(wanted), abs=1e-5)


@given(reference=LOGITS, coef=st.floats(0.2, 3))
@settings(deadline=None, max_examples=25)
async def test_no_token_is_preferred_where_reward_and_penalty_are_balanced(reference, coef):
    """The policy that is best for mean reward minus penalty is in proportion to ``p * exp(reward / coef)``."""
    rewards = np.arange(VOCABULARY) / VOCABULARY
    best = log_softmax(log_softmax(reference) + rewards / coef)
    batch = await penalised(
        plain_batch([one_token_each(best, rewards.tolist())]), penalty_to(reference, coef)
    )
    assert np.ptp(await advantages_of(batch)) < 1e-5


def two_turns():
    first = transition([1], [5, 6], logprobs=[-1.0, -1.0])
    second = transition([1, 5, 6, 2], [3, 4], logprobs=[-1.0, -1.0])
    masked = transition([1, 5, 6, 2, 3, 4, 2], [7], logprobs=[-1.0], masked=True)
    return Trajectory([first, second, masked], tinker.ModelInput.empty())


class FirstEarns(Group):
    """Of each seat the first token earns."""

    def credit(self):
        spans = [
            SpanCredit(
                seat=seat, transition=0, start=0, stop=1, stream="r", round_index=0, reward=float(seat)
            )
            for seat in range(2)
        ]
        return GroupCredit(spans=spans, weights={"r": 1.0})


async def test_tokens_that_earned_nothing_are_penalised_and_masked_ones_are_not():
    group = outcome(FirstEarns(), [two_turns(), two_turns()], [0.0, 1.0])
    assert [action_values(datum, "advantages").tolist() for datum in plain_batch([group]).data_D] == [
        [-0.5],
        [0.5],
    ]
    batch = plain_batch([group], keeps_silent=True)
    quiet = [action_values(datum, "advantages").tolist() for datum in batch.data_D]
    assert quiet == [[-0.5, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0]]
    penalty = penalty_to(np.zeros(VOCABULARY), 0.1)
    penalty.reference.sampling_client.logprobs = np.array(
        [-1.0] * 6 + [-3.0, -1.0]
    )  # two tokens of eight by 2 nats
    made = await penalised(batch, penalty)
    assert made.metrics["optim/kl_reference"] == pytest.approx(0.5)
    # the last turn of each is masked, and read all the same
    assert made.metrics["optim/reference_tokens"] == 2 * 7
    for datum, start in zip(made.data_D, (-0.5, 0.5), strict=True):
        assert action_values(datum, "advantages") == pytest.approx([start + 0.05, -0.15, 0.05, 0.05])
        assert action_values(datum, "logprobs").tolist() == [-1.0] * 4


async def test_it_is_the_cookbooks_where_all_is_the_policys_own():
    group = outcome(FirstEarns(), [two_turns(), two_turns()], [0.0, 1.0])
    ours, theirs = (plain_batch([group], keeps_silent=True) for _ in range(2))
    penalty = penalty_to(np.arange(8.0), 0.3)
    ours = await penalised(ours, penalty)

    class Reference:
        async def compute_logprobs_async(self, prompt):
            return [0.0, *(await penalty.reference.current().compute_logprobs(prompt))[1:]]

    told = await incorporate_kl_penalty(theirs.data_D, Reference(), 0.3, 0.0)
    assert ours.metrics["optim/kl_reference"] == pytest.approx(told["kl_policy_base"], rel=1e-5)
    assert await advantages_of(ours) == pytest.approx(await advantages_of(theirs), abs=1e-5)


async def test_samples_behind_swapped_contexts_have_no_penalty():
    groups = [iid((1.0, 1.0)), hint()]
    before = await make_batch(ContextEngine(), groups, config(), keeps_silent=True)
    assert before.num_data_N == [1, 1, 1, 1]
    assert (await make_batch(ContextEngine(), groups, config())).num_data_N == [0, 0, 1, 1]
    after = await penalised(before, penalty_to(np.zeros(VOCABULARY)))
    assert before.foreign_D == [False, False, True, True]
    for place, (old, new) in enumerate(zip(before.data_D, after.data_D, strict=True)):
        is_same = old.loss_fn_inputs["advantages"].data == new.loss_fn_inputs["advantages"].data
        assert is_same == before.foreign_D[place]
    alone = await penalised(
        await make_batch(ContextEngine(), [hint()], config()), penalty_to(np.zeros(VOCABULARY))
    )
    assert "optim/kl_reference" not in alone.metrics
    assert any("kl_penalty" in text for text in alone.warnings)


async def test_a_server_may_leave_out_the_place_of_the_first_token():
    class Shorter(BanditSampler):
        def compute_logprobs(self, prompt):
            return Done(super().compute_logprobs(prompt).value[1:])

    group = outcome(FirstEarns(), [two_turns(), two_turns()], [0.0, 1.0])
    batch = plain_batch([group], keeps_silent=True)
    reference = PolicyRef(sampling_client=Shorter(np.arange(8.0)))
    found = await penalised(batch, KlPenalty(coef=1.0, reference=reference))
    whole = await penalised(batch, penalty_to(np.arange(8.0)))
    assert (await advantages_of(found)).tolist() == (await advantages_of(whole)).tolist()


async def test_a_reference_that_tells_nothing_ends_the_step():
    class Silent:
        def __init__(self, answer):
            self.answer = answer

        def compute_logprobs(self, prompt):
            return Done(self.answer)

    batch = plain_batch([one_token_each(np.zeros(VOCABULARY), np.arange(8.0).tolist())])
    for answer in ([None, None], [], [None, float("inf")]):
        penalty = KlPenalty(coef=1.0, reference=PolicyRef(sampling_client=Silent(answer)))
        with pytest.raises(FloatingPointError, match="no usable logprob"):
            await penalised(batch, penalty)
    with pytest.raises(ValueError, match="positive number; got 0"):
        penalty_to(np.zeros(VOCABULARY), 0.0)


def one_token_run(folder, coef, **options):
    run = make_run(folder, eval_every=0, save_every=0, **options)
    sampling = replace(run.config.sampling, max_tokens=1)
    run = replace(run, config=replace(run.config, sampling=sampling))
    return replace(run, penalty=penalty_to(np.zeros(VOCABULARY), coef)) if coef else run


@pytest.mark.parametrize(("coef", "least", "most"), [(None, 0.97, 1.0), (0.5, 0.37, 0.50), (5.0, 0.1, 0.19)])
async def test_a_policy_comes_to_rest_where_the_closed_form_says(tmp_path, coef, least, most):
    """0.43, and 0.14: both means, of a group of four and of a batch of twelve, hold a token's own part, too."""
    run = one_token_run(tmp_path, coef, num_steps=400)
    seen = []
    inner = run.client.save_weights_and_get_sampling_client

    def watched():
        seen.append(np.exp(log_softmax(run.client.logits))[GOOD])
        return inner()

    run.client.save_weights_and_get_sampling_client = watched
    assert await train(run)
    assert least < np.mean(seen[200:]) < most


@pytest.mark.parametrize("group_class", [None, Credited])
async def test_the_first_step_has_no_penalty_since_the_policy_is_its_reference(tmp_path, group_class):
    options = {} if group_class is None else {"group_class": group_class}
    await train(one_token_run(tmp_path / "free", None, **options))
    await train(one_token_run(tmp_path / "held", 0.3, **options))
    (free, *_), (held, *later) = metrics_of(tmp_path / "free"), metrics_of(tmp_path / "held")
    assert free == held
    assert all("optim/kl_reference" in row for row in later)
    # all three groups of four are in a step, with or without a signal
    assert [row["optim/datums"] for row in later] == [12] * len(later)


async def test_the_tokens_that_a_run_keeps_have_the_advantages_that_were_trained(tmp_path):
    run = one_token_run(tmp_path, 0.3, tokens_every=1)
    assert isinstance(run.dataset, CountDataset)
    assert await train(run)
    *_, row = [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]
    sampled = [turn["sampling"][0] for turn in row["turns"]]
    penalised_by = np.log(VOCABULARY) + np.array(sampled)
    rewards = np.array([float(turn["ids"] == [GOOD]) for turn in row["turns"]])
    advantages = np.array([turn["advantages"][0] for turn in row["turns"]])
    rest = advantages - (rewards - rewards.mean()) + 0.3 * penalised_by
    assert np.ptp(rest) < 1e-5
