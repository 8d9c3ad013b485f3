"""CoMAS on critique self-play: author and critics of a proposal share 1, and verdicts are paid for their form."""

from collections import Counter
from dataclasses import replace

import pytest
from review_agents import CHANGING, HONEST, IMPROVING, Population, builder_of, but, everyone, play

import viva
from viva.judging.records import ConversationRecord
from viva.rewards.critique import PeerReview, stored_votes
from viva.rewards.review import ReviewRules, review_rules
from viva.training.rollouts import run_group


async def played(agents, reward=None):
    builder = replace(builder_of(len(agents)), reward=reward or viva.rewards.comas())
    outcome = await run_group(builder, Population(agents=agents), max_retries=0)
    assert outcome.void_reason is None
    return outcome, builder


async def earned(builder, reward=None):
    record = ConversationRecord.model_validate(builder.record())
    return (reward or viva.rewards.comas()).earned(await stored_votes(record, ReviewRules(), 0))


async def test_author_and_critics_of_a_proposal_share_one():
    outcome, builder = await played(everyone(CHANGING))
    found = await earned(builder)
    _, reviewed, _ = await play(everyone(CHANGING), rules=ReviewRules())
    scores = reviewed.record()["scores"]["initial"]
    assert found.proposal == pytest.approx({int(agent): score for agent, score in scores.items()})
    for own in found.critique.values():
        assert own == pytest.approx({target: 1 - found.proposal[target] for target in own})
    assert outcome.group.final_rewards_G[::2] == pytest.approx([found.total(agent) for agent in range(4)])


async def test_a_critique_after_which_the_solution_is_better_is_paid_more():
    better = await earned((await played(everyone(IMPROVING)))[1])
    same = await earned((await played(everyone(HONEST)))[1])
    for critic, own in better.critique.items():
        assert sum(own.values()) > sum(same.critique[critic].values())
    assert all(better.proposal[agent] < same.proposal[agent] for agent in range(4))


async def test_every_part_has_its_own_tokens():
    _, builder = await played(everyone(CHANGING))
    found, credit = await earned(builder), builder.credit()
    seats = builder.protocol.seats(4)
    for span in credit.spans:
        agent, lane = seats[span.seat]
        if span.round_index == 1:
            assert lane == 1
            assert span.reward in found.critique[agent].values()
        else:
            column = {0: found.proposal, 2: found.revision, 3: found.verdict}[span.round_index]
            assert span.reward == column[agent]
    assert Counter(span.round_index for span in credit.spans) == {0: 4, 1: 4 * 3, 2: 4, 3: 4}
    assert set(credit.weights.values()) == {1.0}


async def test_a_verdict_that_cannot_be_read_costs_one():
    _, builder = await played(everyone(HONEST) | {3: but(HONEST, verdict="Who knows.")})
    assert (await earned(builder)).verdict == {0: 0.0, 1: 0.0, 2: 0.0, 3: -1.0}


def test_what_it_cannot_pay_is_refused():
    protocol = viva.Protocol(rounds=[viva.Round("first", "Say it.")])
    with pytest.raises(
        ValueError, match=r"'comas' scores proposals.*does not ask for critique.*viva.selfplay"
    ):
        viva.rewards.comas().check(protocol, 3)
    with pytest.raises(ValueError, match=r"needs fit='joint'.*got 'separate'"):
        replace(viva.rewards.comas(), review=PeerReview(rules=review_rules("paper")))
