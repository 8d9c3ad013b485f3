"""One stream of peer review alone: what the whole review gives that stream, on its tokens and no others."""

import pytest
from review_agents import CHANGING, everyone, play, streams_of

import viva
from viva.judging.judge import JudgeOptions
from viva.rewards.review import STREAMS, review_rules

SEGMENTS = {"r_sol": {0, 2}, "r_meta": {3}, "r_diag": {1}}
"""Rounds in which a stream's tokens are said."""


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("preset", ["paper", "robust"])
async def test_a_stream_alone_is_paid_what_the_whole_review_gives_it(stream, preset):
    reward = viva.rewards.find_reward(stream)
    assert (reward.name, reward.rules.weights) == (stream, {name: float(name == stream) for name in STREAMS})
    alone = viva.rewards.peer_review(preset=preset).only(stream)
    _, whole, _ = await play(everyone(CHANGING), rules=review_rules(preset))
    outcome, builder, _ = await play(everyone(CHANGING), rules=alone.rules)
    expected = {agent: own[stream] or 0.0 for agent, own in streams_of(whole).items()}
    rewards_G = outcome.group.final_rewards_G
    assert [sum(rewards_G[2 * agent : 2 * agent + 2]) for agent in expected] == pytest.approx(
        list(expected.values())
    )
    paid = {span.round_index for span, advantage in builder.credit().advantages() if advantage}
    assert paid <= SEGMENTS[stream]
    if stream == "r_sol":
        assert paid


def test_options_are_those_of_peer_review():
    assert viva.rewards.r_diag(preset="paper").rules.diag == "sum"
    assert viva.rewards.r_sol(judge=JudgeOptions(policy="initial")).judge.policy == "initial"
    with pytest.raises(ValueError, match="one of r_sol, r_meta, r_diag; got 'r_dag'"):
        viva.rewards.peer_review().only("r_dag")


@pytest.mark.parametrize("name", [*STREAMS, "shuffled_r_sol"])
def test_a_protocol_without_votes_is_refused(name):
    protocol = viva.Protocol(rounds=[viva.Round("first", "Say it.")])
    with pytest.raises(ValueError, match=r"does not ask for .*ranking.*Use viva.selfplay.critique"):
        viva.rewards.find_reward(name).check(protocol, 3)
