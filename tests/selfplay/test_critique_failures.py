"""Critique self-play when agents, judge or fit fail, and in groups at the edge."""

import asyncio
import json
import random
from typing import Any

import pytest
from review_agents import (
    BOTH,
    HONEST,
    IMPROVING,
    PAPER,
    ROBUST,
    SEGMENTS,
    Place,
    Population,
    builder_of,
    but,
    column,
    crashing_at,
    everyone,
    judge_of,
    metrics_of,
    play,
    streams,
    streams_of,
)

from viva.conversation.coordinator import ConversationVoidError
from viva.judging.bradley_terry import BradleyTerryError
from viva.judging.comparison import JudgeError
from viva.rewards import critique
from viva.rewards.review import ReviewRules, ReviewScores
from viva.testing import ScriptedReply, silent
from viva.training.rollouts import run_groups

# failures


@pytest.mark.parametrize("on_failure", ["void", "continue"])
@pytest.mark.parametrize("segment", SEGMENTS)
async def test_a_crash_in_any_segment_follows_the_failure_rule(segment: str, on_failure: str) -> None:
    agents = everyone(IMPROVING) | {1: crashing_at(IMPROVING, segment)}
    outcome, builder, population = await play(agents, on_failure=on_failure)
    round_index = {"proposal": 0, "ranking": 1, "critique": 1, "revision": 2, "verdict": 3}[segment]
    record = builder.record()
    assert record is not None
    (failure,) = record["failures"]
    assert (failure["agent_id"], failure["round_index"]) == (1, round_index)
    assert f"no {segment}" in failure["reason"]
    json.dumps(record)
    if on_failure == "void":
        assert outcome.group is None
        assert f"agent 1 failed in round {round_index + 1}" in (outcome.void_reason or "")
        assert builder.credit() is None
        assert (record["scores"], record["streams"], record["rewards"]) == ({}, {}, {})
        assert population.num_calls <= 4 * (1 + round_index + (round_index > 0))
        return
    assert outcome.void_reason is None
    assert outcome.group is not None
    assert set(record["rewards"]) == set(record["streams"]) == {"0", "2", "3"}
    assert outcome.group.final_rewards_G[2:4] == [0.0, 0.0]
    credit = builder.credit()
    assert credit is not None
    assert {span.seat // 2 for span in credit.spans} == {0, 2, 3}
    assert all(agent["r_diag"] > 0.1 for agent in streams_of(builder).values())


async def test_two_that_are_left_vote_on_each_other_and_are_scored() -> None:
    agents = everyone(IMPROVING) | dict.fromkeys((1, 3), crashing_at(IMPROVING, "ranking"))
    outcome, builder, _ = await play(agents, on_failure="continue")
    assert outcome.void_reason is None
    rewards = streams_of(builder)
    assert list(rewards) == [0, 2]
    assert rewards[0]["r_sol"] < rewards[2]["r_sol"]
    assert rewards[0]["r_meta"] == rewards[2]["r_meta"] == 1.0
    assert metrics_of(outcome)[1] == {}


async def test_one_that_is_left_has_nobody_to_be_compared_with() -> None:
    agents = everyone(crashing_at(HONEST, "critique")) | {2: HONEST}
    outcome, _, _ = await play(agents, on_failure="continue")
    assert outcome.group is None
    assert "agent 3 failed in round 2" in (outcome.void_reason or "")


async def test_a_seat_that_stopped_without_a_word_voids_the_conversation() -> None:
    builder = builder_of(on_failure="continue")
    envs = await builder.make_envs()
    with pytest.raises(ConversationVoidError, match=r"agents \[0, 1, 2, 3\] stopped before"):
        await builder.compute_group_rewards([], envs)


async def test_a_judge_that_fails_voids_the_conversation_and_leaves_no_call_behind() -> None:
    judge = judge_of(lambda prompt: {})
    judge.policy.sampling_client.next_token = lambda prompt: {"A": 3.0}
    builder = builder_of(judge=judge)
    (outcome,) = await run_groups([builder], Population(agents=everyone(IMPROVING)), max_retries=0)
    assert outcome.group is None
    assert outcome.failures[-1].error_type == JudgeError.__name__
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert (builder.record() or {})["rewards"] == {}
    assert builder.credit() is None


async def test_a_fit_that_fails_voids_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> ReviewScores:
        raise BradleyTerryError("the fit did not converge")

    monkeypatch.setattr(critique, "score_review", failing)
    outcome, builder, _ = await play(everyone(IMPROVING))
    assert outcome.group is None
    assert "did not converge" in (outcome.void_reason or "")
    assert len((builder.record() or {})["comparisons"]) == 8


async def test_a_retry_is_a_conversation_of_its_own() -> None:
    flaky_calls = iter(range(99))

    def flaky(place: Place) -> ScriptedReply | str:
        return HONEST(place) if next(flaky_calls) else crashing_at(HONEST, "proposal")(place)

    builder = builder_of()
    (outcome,) = await run_groups([builder], Population(agents=everyone(HONEST) | {1: flaky}), max_retries=1)
    assert (outcome.retries, outcome.void_reason) == (1, None)
    assert (builder.record() or {})["failures"] == []
    assert streams_of(builder) == await streams(everyone(HONEST))


class Storm:
    """Agents of which some crash or talk nonsense, by a seed."""

    def __init__(self, seed: int) -> None:
        fate = random.Random(seed)

        def stormy(place: Place) -> ScriptedReply | str:
            draw = fates[place.agent_id, place.segment]
            if draw < 0.04:
                return crashing_at(IMPROVING, place.segment)(place)
            return (
                IMPROVING(place)
                if draw < 0.7
                else silent()
                if draw < 0.8
                else "A > > B\nCritique of Z: ?\n= ="
            )

        fates = {(agent, segment): fate.random() for agent in range(4) for segment in SEGMENTS}
        self.agents = everyone(stormy)


@pytest.mark.parametrize("on_failure", ["void", "continue"])
def test_in_a_storm_of_faults_every_conversation_ends_and_speed_changes_nothing(on_failure: str) -> None:
    async def run(latency_seed: int) -> list[Any]:
        results: list[Any] = []
        for seed in range(12):
            outcome, builder, _ = await play(
                Storm(seed).agents, on_failure=on_failure, seed=seed, latencies=random.Random(latency_seed)
            )
            rewards = outcome.group and (outcome.group.final_rewards_G, outcome.group.metrics_G)
            record = builder.record()
            assert record is not None
            assert (outcome.group is None) == bool(outcome.void_reason)
            results.append((outcome.void_reason, rewards, builder.credit(), record))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return results

    first, second = asyncio.run(run(0)), asyncio.run(run(1))
    assert sum(rewards is not None for _, rewards, _, _ in first) >= 4
    kept = [result for result in first if result[1] is not None]
    assert kept == [result for result in second if result[1] is not None]


# groups at the edge


@BOTH
async def test_two_agents_rank_both_and_promoting_oneself_gives_a_tie_at_best(rules: ReviewRules) -> None:
    fair = await streams(everyone(HONEST, 2), rules=rules)
    assert fair[0]["r_sol"] < 0.4 < 0.6 < fair[1]["r_sol"]
    mine = but(HONEST, **dict.fromkeys(("ranking", "verdict"), lambda p: f"Ranking: {p.own} > {p.others[0]}"))
    rewards = await streams({0: mine, 1: HONEST}, rules=rules)
    assert [agent["r_sol"] for agent in rewards.values()] == pytest.approx([0.5, 0.5])
    assert {agent["r_diag"] for agent in rewards.values()} == {0.0}


@pytest.mark.parametrize("options", [{}, {"judge": None}], ids=["judge", "agents"])
async def test_two_agents_who_both_improve_are_paid_for_their_critique(options: dict[str, Any]) -> None:
    improved = await streams(everyone(IMPROVING, 2), **options)
    assert min(agent["r_diag"] or 0.0 for agent in improved.values()) > 0.1
    unchanged = await streams(everyone(HONEST, 2), **options)
    assert {agent["r_diag"] for agent in unchanged.values()} == {0.0}


@BOTH
async def test_identical_solutions_teach_nothing_under_robust_whatever_is_voted(rules: ReviewRules) -> None:
    same = but(
        HONEST,
        proposal="the same",
        revision="Defend: the same",
        ranking=lambda place: f"Ranking: {' > '.join(place.others)}",
        verdict=lambda place: f"Ranking: {' > '.join(place.others)}",
    )
    outcome, builder, _ = await play(everyone(same), rules=rules)
    assert outcome.void_reason is None
    credit = builder.credit()
    assert credit is not None
    if rules is ROBUST:
        assert column(builder, "r_sol") == [0.5] * 4
        assert column(builder, "r_meta") == [None] * 4
        assert not any(advantage for _, advantage in credit.advantages())
    else:
        assert len(set(column(builder, "r_sol"))) > 1  # votes between equals are noise, and pay


@BOTH
@pytest.mark.parametrize("segment", ["ranking", "verdict", "critique"])
async def test_a_round_in_which_nothing_can_be_read_has_a_defined_outcome(
    rules: ReviewRules, segment: str
) -> None:
    outcome, builder, _ = await play(everyone(but(IMPROVING, **{segment: "no idea"})), rules=rules)
    assert outcome.void_reason is None
    rewards = streams_of(builder)
    if segment == "critique":
        assert [agent["r_diag"] for agent in rewards.values()] == [0.0] * 4
    if segment == "verdict":
        assert [agent["r_meta"] for agent in rewards.values()] == [None] * 4
    if rules is PAPER and segment != "critique":
        assert [agent["r_diag"] for agent in rewards.values()] == [0.0] * 4  # no gain over an empty round
    if rules is PAPER and segment == "verdict":
        assert [agent["total"] for agent in rewards.values()] == [0.5] * 4
    streams_with_spans = {span.stream for span in (builder.credit() or pytest.fail("no credit")).spans}
    silent_stream = {"ranking": None, "verdict": "r_meta", "critique": "r_diag"}[segment]
    assert streams_with_spans == {"r_sol", "r_meta", "r_diag"} - {silent_stream}


async def test_a_conversation_of_nonsense_is_worth_the_same_to_all() -> None:
    outcome, builder, _ = await play(everyone(lambda place: silent()))
    assert outcome.group is not None
    assert outcome.group.final_rewards_G == [0.5, 0.0] * 4
    assert column(builder, "r_meta") == [None] * 4
    assert not any(advantage for _, advantage in (builder.credit() or pytest.fail("no credit")).advantages())


async def test_without_a_judge_the_agents_compare_in_a_last_round_that_earns_nothing() -> None:
    outcome, builder, population = await play(everyone(IMPROVING), judge=None)
    assert outcome.group is not None
    assert population.num_calls == 4 * 6
    assert [len(trajectory.transitions) for trajectory in outcome.group.trajectories_G] == [5, 1] * 4
    assert {span.round_index for span in (builder.credit() or pytest.fail("no credit")).spans} == {0, 1, 2, 3}
    record = builder.record() or {}
    assert record["comparisons"] == []
    assert len([turn for turn in record["turns"] if turn["segment"] == "comparison"]) == 4
    gained = [metrics["gain/paid"] for metrics in metrics_of(outcome)]
    assert min(gained) > 0.15


async def test_the_paper_asks_neither_judge_nor_agents_to_compare() -> None:
    def forbidden(prompt: str) -> dict[str, float]:
        pytest.fail("the judge was asked")

    outcome, builder, population = await play(everyone(IMPROVING), rules=PAPER, judge=judge_of(forbidden))
    assert outcome.void_reason is None
    assert population.num_calls == 4 * 5
    assert (builder.record() or {})["comparisons"] == []


async def test_the_judge_is_asked_only_about_solutions_that_changed_in_both_orders() -> None:
    agents = everyone(HONEST) | {2: IMPROVING}
    _, builder, _ = await play(agents)
    comparisons = (builder.record() or {})["comparisons"]
    assert [(row["agent_id"], row["first"], row["second"]) for row in comparisons] == [(2, 0, 1), (2, 1, 0)]
