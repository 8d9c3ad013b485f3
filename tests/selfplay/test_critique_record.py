"""What a critique conversation leaves behind: rewards by seat, transcript, metrics."""

import asyncio
import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from review_agents import (
    BOTH,
    CHANGING,
    HONEST,
    PAPER,
    ROBUST,
    Population,
    builder_of,
    but,
    column,
    everyone,
    honest,
    judge_of,
    metrics_of,
    others_of,
    play,
    quality,
    ranking_of,
    streams,
    streams_of,
)

import viva
from viva.judging.records import ConversationRecord
from viva.rewards import PeerReview, Reward, Shuffled
from viva.rewards.critique import review_votes, stored_votes
from viva.rewards.review import ReviewRules
from viva.training.rollouts import run_group, run_groups

# rewards, record, metrics


@BOTH
@settings(max_examples=8)
@given(
    weights=st.fixed_dictionaries(dict.fromkeys(("r_sol", "r_meta", "r_diag"), st.floats(0, 3))),
    seed=st.integers(0, 99),
)
def test_both_lanes_of_an_agent_together_have_its_total(
    rules: ReviewRules, weights: dict[str, float], seed: int
) -> None:
    rules = ReviewRules(fit=rules.fit, diag=rules.diag, weights=weights)
    outcome, builder, _ = asyncio.run(play(everyone(CHANGING), rules=rules, seed=seed))
    assert outcome.group is not None
    rewards_G = outcome.group.final_rewards_G
    for agent_id, agent in streams_of(builder).items():
        first, second = rewards_G[2 * agent_id : 2 * agent_id + 2]
        assert first + second == pytest.approx(agent["total"])
        assert second == pytest.approx(weights["r_diag"] * agent["r_diag"])
        total = sum(weight * (agent[stream] or 0.0) for stream, weight in weights.items())
        assert agent["total"] == pytest.approx(total)


@pytest.mark.parametrize(
    ("reward", "earning"),
    [
        (PeerReview(rules=PAPER), {"proposal", "critique", "revision", "verdict"}),
        (PeerReview(rules=ROBUST), {"proposal", "revision"}),
        (PeerReview(rules=PAPER).only("r_diag"), {"critique"}),
        (Shuffled(of=PeerReview(rules=PAPER).only("r_meta")), {"verdict"}),
        (viva.rewards.comas(), {"proposal", "critique", "revision", "verdict"}),
        (viva.rewards.serl_votes(), {"proposal", "revision", "verdict"}),
        (viva.rewards.maca(), {"revision"}),
        (viva.rewards.majority(), {"proposal", "critique", "revision", "verdict"}),
    ],
)
async def test_a_reward_knows_beforehand_which_replies_can_earn(reward: Reward, earning: set[str]) -> None:
    builder = replace(builder_of(), reward=reward, judge=judge_of() if reward.judge else None)
    outcome = await run_group(builder, Population(agents=everyone(CHANGING)), max_retries=0)
    assert outcome.group is not None
    turns = ConversationRecord.model_validate(builder.record()).turns
    can_earn = reward.earning(builder.protocol, turns)
    assert {turn.segment for turn, can in zip(turns, can_earn, strict=True) if can} == earning
    credit = builder.credit() or pytest.fail("no credit")
    paid = {(span.seat, span.transition) for span in credit.spans if credit.weights[span.stream]}
    found = [
        [can for each, can in zip(turns, can_earn, strict=True) if (each.agent_id, each.lane) == seat]
        for seat in builder.protocol.seats(builder.num_agents)
    ]
    assert paid == {(seat, place) for seat, own in enumerate(found) for place, can in enumerate(own) if can}


async def test_a_seat_of_weight_0_is_not_paid_and_has_no_part_in_the_mean() -> None:
    rules = replace(ROBUST, weights={"r_sol": 1.0, "r_meta": 0.0, "r_diag": 0.0})
    outcome, builder, _ = await play(everyone(CHANGING), rules=rules)
    assert builder.unpaid_seats() == {1, 3, 5, 7}
    assert [reward for reward in outcome.paid_rewards() if reward is not None] == column(builder, "r_sol")


async def test_rewards_follow_the_agent_however_seats_are_listed() -> None:
    builder = builder_of()
    envs = list(await builder.make_envs())
    assert [(env.agent_id, env.lane) for env in envs] == builder.protocol.seats(4)
    with pytest.raises(ValueError, match="the environments of one make_envs call"):
        await builder.compute_group_rewards([], [*envs[:-1], (await builder.make_envs())[-1]])


async def test_the_record_is_json_and_complete() -> None:
    _, builder, _ = await play(everyone(CHANGING))
    record = json.loads(json.dumps(builder.record()))
    assert set(record) == {
        "system_prompt",
        "judge",
        *("question", "answer", "protocol", "num_agents", "max_rounds", "turns", "failures", "comparisons"),
        *("rewards", "correct", "correct_initial", "rules", "scores", "streams"),
    }
    assert (record["protocol"], record["num_agents"], record["max_rounds"]) == ("critique_self_play", 4, 4)
    assert len(record["turns"]) == 20
    assert record["rules"]["weights"] == {"r_sol": 1.0, "r_meta": 0.0, "r_diag": 0.0}
    assert set(record["scores"]) == {"initial", "final", "initial_error", "final_error"}
    agents = {"0", "1", "2", "3"}
    assert all(set(by_agent) == agents for by_agent in record["scores"].values())
    assert all(set(own) == {"r_sol", "r_meta", "r_diag", "total"} for own in record["streams"].values())
    assert record["rewards"] == {agent_id: own["total"] for agent_id, own in record["streams"].items()}
    assert record["correct"] == {"0": False, "1": True, "2": True, "3": True}
    assert record["correct_initial"] == dict.fromkeys(agents, False)
    turn = next(turn for turn in record["turns"] if turn["segment"] == "verdict")
    assert set(turn["response"]["preferences"][0]) == {"winner", "loser"}
    assert turn["prompt"].startswith("Problem:\n> Which?\n")


SHARED = {"episode_length"} | {
    f"judge/{round_}/{figure}"
    for round_ in ("ranking", "verdict")
    for figure in ("accuracy", "invalid_rate", "unreadable_rate", "tie_rate", "cyclic_triads", "order_flips")
}
BY_AGENT = ("reward", "score_initial", "score_final", "score_change", "correct")
OWN = {
    *("parsing_failures", "critiques/given", "critiques/received", "critiques/dropped"),
    *("revision/changed", "revision/says_revise", "revision/says_defend", "correct/first", "correct/final"),
    *("gain/mean", "gain/paid", "gain/measured"),
}


async def test_the_metrics_are_those_of_the_specification() -> None:
    mixed = honest({0: 2, 1: 10, 2: 12, 3: 4})
    worse = but(mixed, revision="Revise: quality 1 by the wayside")
    better = but(mixed, revision="Revise: quality 20 by 0")
    outcome, _, _ = await play({0: better, 1: worse, 2: mixed, 3: mixed})
    metrics_A = metrics_of(outcome)
    for agent_id, metrics in enumerate(metrics_A):
        own = {
            f"agent_{agent_id}/{name}"
            for name in ("reward", "score_initial", "score_final", "score_change", "correct")
        }
        assert OWN - {"num_turns"} | SHARED | own <= set(metrics)
        change = metrics[f"agent_{agent_id}/score_final"] - metrics[f"agent_{agent_id}/score_initial"]
        assert metrics[f"agent_{agent_id}/score_change"] == pytest.approx(change)
        assert (metrics["critiques/given"], metrics["critiques/received"]) == (3, 3)
    assert [metrics["revision/changed"] for metrics in metrics_A] == [1.0, 1.0, 0.0, 0.0]
    assert [metrics["revision/says_defend"] for metrics in metrics_A] == [0.0, 0.0, 1.0, 1.0]
    assert [metrics.get("flip/wrong_to_right") for metrics in metrics_A] == [1.0, None, None, 0.0]
    assert [metrics.get("flip/right_to_wrong") for metrics in metrics_A] == [None, 1.0, 0.0, None]
    first = metrics_A[0]
    assert first["rank_correlation"] > 0.8
    assert (first["reward_truth_gap"], first["correct/best"], first["judge/verdict/accuracy"]) == (
        0.0,
        1.0,
        1.0,
    )
    assert {"judge/revision/position_bias", "judge/revision/invalid_rate"} <= set(first)
    assert first["judge/verdict/length_preference"] == pytest.approx(2 / 3, abs=0.34)
    json.dumps(metrics_A)


async def test_a_reward_that_pays_for_being_wrong_shows_in_the_gap() -> None:
    backwards = but(
        HONEST, verdict=lambda place: ranking_of(others_of(place), key=lambda text: -quality(text))
    )
    outcome, _, _ = await play(everyone(backwards), answer="3", rules=PAPER)
    assert metrics_of(outcome)[0]["reward_truth_gap"] == 1.0
    assert metrics_of(outcome)[0]["rank_correlation"] < -0.8


async def test_two_agents_that_may_vote_for_themselves_show_self_preference() -> None:
    mine = but(HONEST, verdict=lambda place: f"Ranking: {place.own} > {place.others[0]}")
    outcome, _, _ = await play(everyone(mine, 2))
    assert metrics_of(outcome)[0]["judge/verdict/self_preference"] == 1.0
    assert metrics_of(outcome)[0]["judge/ranking/self_preference"] == 0.5


async def test_answers_change_metrics_and_never_a_reward() -> None:
    rewards = []
    for options in ({"answer": "9"}, {"answer": None}, {"grader": None}, {"answer": "0"}):
        outcome, _, _ = await play(everyone(CHANGING), **options)
        assert outcome.group is not None
        rewards.append(outcome.group.final_rewards_G)
        graded = {"correct/final", "reward_truth_gap"} & set(metrics_of(outcome)[0])
        assert bool(graded) == (None not in options.values())
    assert rewards == [rewards[0]] * 4


# what is kept and what is refused


async def test_a_builder_can_be_sent_to_another_process() -> None:
    again = pickle.loads(pickle.dumps(builder_of(judge=None, rules=PAPER, grader=None)))
    (outcome,) = await run_groups([again], Population(agents=everyone(HONEST)), max_retries=0)
    assert outcome.void_reason is None
    assert streams_of(again) == await streams(everyone(HONEST), rules=PAPER)


async def test_a_stored_conversation_without_its_number_of_agents_is_scored_by_who_spoke() -> None:
    builder = builder_of(judge=None, rules=PAPER, grader=None)
    await run_groups([builder], Population(agents=everyone(HONEST)), max_retries=0)
    stored = dict(builder.record())
    record = ConversationRecord.model_validate(stored)
    del stored["num_agents"]
    votes = await stored_votes(ConversationRecord.model_validate(stored), PAPER, 0)
    assert votes == await stored_votes(record, PAPER, 0)
    assert len(votes.agents) > 1


async def test_stored_votes_are_those_that_were_scored() -> None:
    builder = builder_of()
    envs = await builder.make_envs()
    assert builder.record() is None
    assert builder.credit() is None
    with pytest.raises(ValueError, match="at least two agents"):
        review_votes(envs[0].coordinator.conversation, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_agents": 1}, "num_agents must be from 2 to 26"),
        ({"num_agents": 27, "personas": None}, "num_agents must be from 2 to 26"),
        (
            {"num_agents": 15, "judge": None, "personas": None},
            "num_agents must be from 2 to 14 with comparisons",
        ),
        ({"on_failure": "ignore"}, "on_failure must be 'void' or 'continue'; got 'ignore'"),
        ({"personas": {1: "x"}}, r"ids 0, 1, 2, \.\.\. without gaps"),
    ],
)
def test_a_conversation_that_cannot_be_held_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        builder_of(**options)
