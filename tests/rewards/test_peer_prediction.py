"""Mutual predictability: gains against a scorer whose every probability is known, and what training makes of them."""

import asyncio
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from solved import solutions

import viva
from viva import Protocol, Round
from viva.judging.answers import is_correct
from viva.judging.judge import PolicyRef
from viva.judging.scorer import Scorer, ScorerError, ScorerOptions, scorer_messages
from viva.rewards.base import Models
from viva.rewards.credit import group_advantages
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.testing import ScriptedPolicy, ScriptedSamplingClient, tiny_renderer
from viva.training.rollouts import run_group

RENDERER = tiny_renderer()
ANSWERS = "0123"
COPY = 0.7
"""Chance that the second student of the world below says what the first one said."""


def world(before: str, token: str) -> float:
    """Two students answer with a digit: alone uniformly, else the second says the first one's digit more often."""
    first = before.rpartition("first student's answer:\n> ")[2] if "Two students" in before else None
    if first is None:
        return math.log(1 / len(ANSWERS))
    same = token == first[:1]
    return math.log(COPY if same else (1 - COPY) / (len(ANSWERS) - 1))


def scorer_of(logprob=world):
    client = ScriptedSamplingClient(renderer=RENDERER, prompt_logprob=logprob)
    return Scorer(PolicyRef(sampling_client=client), RENDERER), client


def pay(texts, scorer=None):
    reward = viva.rewards.peer_prediction()
    group = asyncio.run(reward.ask(solutions(texts), "Which digit?", Models(scorer=scorer or scorer_of()[0])))
    return reward.pay(group)


@given(st.lists(st.sampled_from(ANSWERS), min_size=2, max_size=6))
def test_the_reward_is_the_mean_log_ratio_of_the_known_world(texts):
    same, other = (math.log(p * len(ANSWERS)) for p in (COPY, (1 - COPY) / (len(ANSWERS) - 1)))
    expected = [
        sum(same if texts[j] == texts[i] else other for j in range(len(texts)) if j != i) / (len(texts) - 1)
        for i in range(len(texts))
    ]
    assert pay(texts) == pytest.approx(expected)


@given(st.lists(st.sampled_from(ANSWERS), min_size=2, max_size=6), st.randoms())
def test_permuting_the_replies_permutes_the_pay(texts, rng):
    order = list(range(len(texts)))
    rng.shuffle(order)
    plain = pay(texts)
    assert pay([texts[index] for index in order]) == pytest.approx([plain[index] for index in order])


@given(st.lists(st.text("0123", min_size=1, max_size=5), min_size=2, max_size=5))
def test_a_scorer_that_does_not_listen_pays_nobody(texts):
    scorer, _ = scorer_of(lambda before, token: -0.5 - int(token) / 10 if token in ANSWERS else 0.0)
    assert pay(texts, scorer) == pytest.approx([0.0] * len(texts))


def test_every_pair_of_texts_is_asked_for_once():
    scorer, client = scorer_of()
    pay(["0", "1", "1", "1"], scorer)
    assert len(client.prompts) == 2 + 3  # each text alone, then 1 behind 0, 0 behind 1, 1 behind 1


def test_replies_that_all_say_the_same_train_nothing():
    assert group_advantages(pay(["2"] * 4)) == [0.0] * 4


def test_a_reply_without_words_neither_predicts_nor_is_predicted():
    alone = pay(["1", "1"])
    found = pay(["1", "1", " "])
    assert found == pytest.approx([alone[0] / 2, alone[1] / 2, 0.0])
    assert pay(["1"]) == [0.0]


def test_the_prompts_quote_what_was_said_and_make_no_control_token_of_it():
    scorer, client = scorer_of(lambda before, token: -1.0)
    pay(["a<|im_end|>b", "c"], scorer)
    count = RENDERER.tokenizer.decode(RENDERER.tokenizer.encode("<|im_end|>", add_special_tokens=False))
    shown = [prompt for prompt in client.prompts if "Two students" in prompt]
    assert count == "<|im_end|>"
    assert any("> a<|im_end|>b\n" in prompt for prompt in shown)
    assert "first student's answer:\n> c\n" in scorer_messages("q", "c")[0]["content"]
    assert "first student" not in scorer_messages("q", None)[0]["content"]


def test_an_engine_that_cannot_tell_is_an_error_and_no_reward():
    silent = ScriptedSamplingClient(renderer=RENDERER)
    with pytest.raises(ScorerError, match=r"no usable log-probabilities.*or a reward without a scorer"):
        pay(["1", "2"], Scorer(PolicyRef(sampling_client=silent), RENDERER))
    scorer, _ = scorer_of(lambda before, token: math.nan)
    with pytest.raises(ScorerError, match="no usable"):
        pay(["1", "2"], scorer)
    reward = viva.rewards.peer_prediction()
    with pytest.raises(ValueError, match="needs what a scorer says of the replies"):
        reward.pay(solutions(["1", "2"]))
    with pytest.raises(ValueError, match="'peer_prediction' needs a scorer; got none"):
        asyncio.run(reward.ask(solutions(["1"]), "q", Models()))


def test_a_policy_that_is_right_more_often_than_not_learns_to_be():
    """Replies of honest peers predict one another: the signal that the paper trains with."""
    rng, logit = random.Random(0), math.log(0.6 / 0.4)
    for _ in range(150):
        right = 1 / (1 + math.exp(-logit))
        draws = [int(rng.random() < right) for _ in range(6)]
        for draw, advantage in zip(draws, group_advantages(pay([str(draw) for draw in draws])), strict=True):
            logit += 0.2 * advantage * (draw - right)
    assert 1 / (1 + math.exp(-logit)) > 0.95


def test_options_name_one_scorer():
    assert viva.rewards.peer_prediction(model="tiny").scorer == ScorerOptions(model="tiny")
    assert viva.rewards.shuffled("peer_prediction").scorer == ScorerOptions()
    with pytest.raises(ValueError, match="must be 'current' or 'initial'; got 'last'"):
        viva.rewards.peer_prediction(policy="last")
    with pytest.raises(ValueError, match="'tiny' is never trained, so policy must be 'initial'"):
        viva.rewards.peer_prediction(policy="current", model="tiny")


@pytest.mark.parametrize("name", ["peer_prediction", "shuffled_peer_prediction"])
def test_agents_are_paid_and_the_transcript_keeps_the_gains(name):
    replies = iter("102112")
    policy = ScriptedPolicy(renderer=RENDERER, script=lambda prompt, call: next(replies))
    options = {
        "question": "Which digit?",
        "renderer": RENDERER,
        "protocol": Protocol(rounds=[Round("first", "Say it."), Round("last", "Again.", ["first"])]),
        "reward": viva.rewards.find_reward(name),
        "num_agents": 3,
        "answer": "1",
        "grader": is_correct,
    }
    with pytest.raises(ValueError, match=r"needs a scorer; got none. Pass one"):
        MultiAgentConversationEnvGroupBuilder(**options)
    builder = MultiAgentConversationEnvGroupBuilder(**options, scorer=scorer_of()[0])

    group = asyncio.run(run_group(builder, policy, max_retries=0)).group
    record = builder.record()
    final = [turn["response"]["solution"] for turn in record["turns"] if turn["round_index"] == 1]
    assert sorted(group.get_total_rewards()) == pytest.approx(sorted(pay(final)))
    assert [sum(own.values()) / 2 for own in record["gains"].values()] == pytest.approx(pay(final))
