"""Majority against minority traces of a debate: who is paid, and for which tokens."""

import asyncio
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from solved import solutions

import viva
from viva import Protocol, Round
from viva.judging.answers import is_correct
from viva.rewards.credit import group_advantages
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.selfplay.round_robin import round_robin_protocol
from viva.testing import ScriptedPolicy, tiny_renderer
from viva.training.rollouts import run_group

RENDERER = tiny_renderer()
DEBATE = Protocol(rounds=[Round("first", "Say it."), Round("last", "Say it again.", ["first"])])


def numbered(numbers, **options):
    return solutions([f"I add. The answer is {number}." for number in numbers], **options)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_one_answer_of_most_pays_and_all_others_cost(numbers):
    counts = Counter(numbers).most_common()
    has_consensus = counts[0][1] > 1 and (len(counts) == 1 or counts[0][1] > counts[1][1])
    found = viva.rewards.maca().pay(numbered(numbers))
    if has_consensus:
        assert found == [1.0 if number == counts[0][0] else -1.0 for number in numbers]
    else:
        assert found == [0.0] * len(numbers)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_with_a_consensus_it_trains_what_the_majority_does_twice_as_strongly(numbers):
    group = numbered(numbers)
    paid = viva.rewards.maca().pay(group)
    if any(paid):
        plain = group_advantages(viva.rewards.majority().pay(group))
        assert all(math.isclose(a, 2 * b) for a, b in zip(group_advantages(paid), plain, strict=True))


def test_a_cut_trace_is_in_the_minority():
    group = numbered([1, 1, 1, 2], finished=[True, True, False, True])
    assert viva.rewards.maca().pay(group) == [1.0, 1.0, -1.0, -1.0]
    assert viva.rewards.maca().figures(group) == {"maca/consensus": 1.0, "maca/share": 0.5}
    assert viva.rewards.maca().figures(numbered([1, 2])) == {"maca/consensus": 0.0}


def talk(reward, protocol, numbers):
    replies = iter(numbers)
    policy = ScriptedPolicy(renderer=RENDERER, script=lambda prompt, call: f"It is {next(replies)}")
    builder = MultiAgentConversationEnvGroupBuilder(
        question="1 + 1?",
        renderer=RENDERER,
        protocol=protocol,
        reward=reward,
        answer="2",
        grader=is_correct,
        num_agents=3,
    )

    return builder, asyncio.run(run_group(builder, policy, max_retries=0)).group


def test_the_last_trace_earns_and_what_was_said_before_does_not():
    builder, group = talk(viva.rewards.maca(), DEBATE, [1, 1, 2, 2, 2, 1])
    assert sorted(group.get_total_rewards()) == [-1.0, 1.0, 1.0]
    spans = builder.credit().spans
    assert {(span.round_index, span.transition) for span in spans} == {(1, 1)}
    assert {span.seat: span.reward for span in spans} == dict(enumerate(group.get_total_rewards()))
    assert group.metrics_G[0]["maca/consensus"] == 1.0
    assert group.metrics_G[0]["reward_truth_gap"] == 0.0
    record = builder.record()
    assert sum(record["correct_initial"].values()) == 1


def test_shuffled_it_pays_the_same_rewards_on_the_same_tokens():
    builder, group = talk(viva.rewards.shuffled("maca"), DEBATE, [1, 1, 2, 2, 2, 1])
    assert sorted(group.get_total_rewards()) == [-1.0, 1.0, 1.0]
    assert sorted(span.reward for span in builder.credit().spans) == [-1.0, 1.0, 1.0]


def test_what_is_no_debate_is_refused():
    alone = Protocol(rounds=[Round("first", "Say it."), Round("last", "Say it again.")])
    with pytest.raises(ValueError, match=r"nobody sees what another says.*use the reward majority"):
        viva.rewards.maca().check(alone, 3)
    with pytest.raises(ValueError, match="num_agents must be at least 2"):
        viva.rewards.maca().check(DEBATE, 1)
    for debate in (DEBATE, round_robin_protocol(2), round_robin_protocol(1)):
        viva.rewards.maca().check(debate, 3)
    assert not viva.rewards.shuffled("maca").pays_samples
