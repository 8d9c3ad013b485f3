"""Critique self-play end to end, from scripted populations through the protocol to rewards and credit."""

import asyncio
import itertools
import json
import pickle
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from review_agents import (
    RENDERER,
    SEGMENTS,
    Behaviour,
    Place,
    Population,
    builder_of,
    but,
    crashing_at,
    honest,
    judge_of,
    play,
    ranking_of,
)

from viva.credit.review import ReviewScores, score_review
from viva.credit.review_rules import PRESETS, ReviewRules
from viva.judging.bradley_terry import BradleyTerryError
from viva.judging.judge import JudgeError
from viva.rl.rollouts import GroupOutcome, run_groups
from viva.selfplay import critique
from viva.selfplay.critique import CritiqueSelfPlayEnvGroupBuilder, review_votes
from viva.selfplay.group import ConversationVoidError
from viva.testing import Reply, silent

QUALITIES = {0: 1, 1: 2, 2: 3, 3: 4}
HONEST = honest(QUALITIES)
IMPROVING = honest(QUALITIES, gain=10)
PAPER, ROBUST = PRESETS["paper"], PRESETS["robust"]
BOTH = pytest.mark.parametrize("rules", [PAPER, ROBUST], ids=["paper", "robust"])


def everyone(behaviour: Behaviour, num_agents: int = 4) -> dict[int, Behaviour]:
    return dict.fromkeys(range(num_agents), behaviour)


def streams_of(builder: CritiqueSelfPlayEnvGroupBuilder) -> dict[int, dict[str, float | None]]:
    record = builder.record()
    assert record is not None
    return {int(agent_id): streams for agent_id, streams in record["streams"].items()}


def column(builder: CritiqueSelfPlayEnvGroupBuilder, name: str) -> list[float | None]:
    return [streams[name] for streams in streams_of(builder).values()]


async def streams(agents: Mapping[int, Behaviour], **options: Any) -> dict[int, dict[str, float | None]]:
    outcome, builder, _ = await play(agents, **options)
    assert outcome.void_reason is None
    return streams_of(builder)


def metrics_of(outcome: GroupOutcome) -> list[dict[str, float | int]]:
    """Of the first lane of every agent; the second has none."""
    assert outcome.group is not None
    assert not any(outcome.group.metrics_G[1::2])
    return outcome.group.metrics_G[::2]


# honest agents, what improvement pays


async def test_honest_agents_are_ranked_by_what_they_are_worth_and_agree() -> None:
    outcome, builder, population = await play(everyone(HONEST))
    assert outcome.failures == ()
    assert population.num_calls == 4 * 5
    r_sol = column(builder, "r_sol")
    assert r_sol == sorted(r_sol)
    assert r_sol == pytest.approx([0.168, 0.377, 0.623, 0.832], abs=1e-3)  # ballots of both rounds, one scale
    assert column(builder, "r_meta") == [1.0] * 4


@pytest.mark.parametrize("revision_votes", ["judge", "agents"])
async def test_where_everyone_improves_robust_pays_every_critic_and_the_paper_nobody(
    revision_votes: str,
) -> None:
    options = {} if revision_votes == "judge" else {"judge": None}
    robust = await streams(everyone(IMPROVING), **options)
    paper = await streams(everyone(IMPROVING), rules=PAPER)
    assert all(agent["r_diag"] > 0.15 for agent in robust.values())
    # the paper's two scales both have mean 0: the same ranking before and after is no gain for anybody
    assert [agent["r_diag"] for agent in paper.values()] == [0.0] * 4
    assert [agent["r_sol"] for agent in paper.values()] == pytest.approx(
        [0.239, 0.408, 0.592, 0.761], abs=1e-3
    )
    assert [agent["total"] for agent in paper.values()] == pytest.approx(
        [1.239, 1.408, 1.592, 1.761], abs=1e-3
    )


async def test_where_nobody_changes_nothing_is_paid_for_critique_by_honest_votes() -> None:
    for rules in (PAPER, ROBUST):
        assert [agent["r_diag"] for agent in (await streams(everyone(HONEST), rules=rules)).values()] == [
            0.0
        ] * 4


async def test_where_nobody_changes_but_the_verdict_the_paper_pays_for_noise_and_robust_does_not() -> None:
    fickle = but(HONEST, verdict=lambda place: ranking_of(_others(place), key=lambda text: -_quality(text)))
    paper, robust = [await streams(everyone(fickle), rules=rules) for rules in (PAPER, ROBUST)]
    assert [agent["r_diag"] for agent in robust.values()] == [0.0] * 4
    # 0 and 1 rise from .239 and .408 to .761 and .592; each critic is paid for both, or for the other one
    assert [agent["r_diag"] for agent in paper.values()] == pytest.approx(
        [0.184, 0.523, 0.707, 0.707], abs=2e-3
    )


async def test_one_that_rises_by_critique_pays_its_critics_under_both_presets() -> None:
    rising = but(HONEST, revision=lambda place: f"Revise: quality {_quality(place.own_solution) + 10} by 0")
    agents = everyone(HONEST) | {0: rising}
    paper, robust = [await streams(agents, rules=rules) for rules in (PAPER, ROBUST)]
    assert [agent["r_diag"] for agent in paper.values()] == pytest.approx(
        [0.0, 0.523, 0.523, 0.523], abs=2e-3
    )
    assert robust[0]["r_diag"] == 0.0
    assert all(
        0.15 < robust[critic]["r_diag"] < 0.25 for critic in (1, 2, 3)
    )  # a third: two targets gained nothing


def _others(place: Place) -> dict[str, str]:
    return {letter: place.letters[letter] for letter in place.others}


def _quality(solution: str) -> int:
    return int(solution.split()[1])


# populations that try to get more


def stuffing(place: Place) -> str:
    honestly = HONEST(place)
    assert isinstance(honestly, str)
    line = honestly.splitlines()[-1]
    repeated = ", ".join([line.removeprefix("Ranking: ")] * 3)
    return "\n".join([honestly, *[line] * 50, f"Final ranking: {repeated}", line.replace(">", " > ")])


@BOTH
async def test_stuffed_ballots_and_repeated_critiques_change_no_reward(rules: ReviewRules) -> None:
    def repeating(place: Place) -> str:
        said = IMPROVING(place)
        assert isinstance(said, str)
        return "\n".join([said] * 5)

    agents = {**everyone(but(IMPROVING, ranking=stuffing, verdict=stuffing), 2), 2: IMPROVING, 3: IMPROVING}
    agents = {agent_id: but(agent, critique=repeating) for agent_id, agent in agents.items()}
    outcome, builder, _ = await play(agents, rules=rules)
    assert streams_of(builder) == await streams(everyone(IMPROVING), rules=rules)
    assert [metrics["critiques/given"] for metrics in metrics_of(outcome)] == [3] * 4
    assert metrics_of(outcome)[0]["critiques/dropped"] == 12
    dropped = [
        turn["response"]["dropped"]
        for turn in (builder.record() or {})["turns"]
        if "verdict" in turn["segment"]
    ]
    assert [causes.get("repeated", 0) > 100 for causes in dropped] == [True, True, False, False]


@BOTH
async def test_self_promotion_is_dropped_counted_and_pays_nothing(rules: ReviewRules) -> None:
    def first(place: Place) -> str:
        honestly = HONEST(place)
        assert isinstance(honestly, str)
        return honestly.replace("Ranking: ", f"Ranking: {place.own} > ")

    agents = everyone(HONEST) | {0: but(HONEST, ranking=first, verdict=first)}
    _, builder, _ = await play(agents, rules=rules)
    assert streams_of(builder) == await streams(everyone(HONEST), rules=rules)
    turns = (builder.record() or {})["turns"]
    assert [turn["response"]["dropped"] for turn in turns if turn["segment"] == "verdict"] == [
        {"own": 3},
        {},
        {},
        {},
    ]
    assert [turn["status"] for turn in turns if turn["segment"] == "verdict"] == [
        "repaired",
        "ok",
        "ok",
        "ok",
    ]


def colluding(behaviour: Behaviour, partner: int, rest: str) -> Behaviour:
    """Ranks the partner first and the others as ``rest`` says."""

    def rank(place: Place) -> str:
        letter_of = {text.split()[-1]: letter for letter, text in place.letters.items()}
        others = "".join(letter_of.get(sign, sign) for sign in rest)
        return f"Ranking: {letter_of[str(partner)]} > {others}"

    return but(behaviour, ranking=rank, verdict=rank)


def with_colluding_pair(rest: str) -> dict[int, Behaviour]:
    behaviour = honest({0: 1, 1: 1, 2: 5, 3: 5})
    return {0: colluding(behaviour, 1, rest), 1: colluding(behaviour, 0, rest), 2: behaviour, 3: behaviour}


@BOTH
@pytest.mark.parametrize("rest", ["2 = 3", "2 > 3", "3 > 2"])
async def test_a_colluding_pair_of_four_does_not_get_above_two_honest_agents(
    rules: ReviewRules, rest: str
) -> None:
    rewards = await streams(with_colluding_pair(rest), rules=rules)
    r_sol = [agent["r_sol"] or 0.0 for agent in rewards.values()]
    assert r_sol[:2] == pytest.approx([0.5, 0.5])  # votes for and against cancel
    assert max(r_sol[2:]) >= 0.5 - 1e-9
    assert [agent["r_diag"] for agent in rewards.values()] == [0.0] * 4


async def test_what_a_pair_gets_by_agreeing_on_the_two_others_is_less_under_robust() -> None:
    paper, robust = [await streams(with_colluding_pair("2 > 3"), rules=rules) for rules in (PAPER, ROBUST)]
    # only the pair votes on (2, 3), so it agrees there; on all else, robust counts the honest ones' disagreement
    assert [agent["r_meta"] for agent in paper.values()] == [1.0, 1.0, None, None]
    assert [agent["r_meta"] for agent in robust.values()] == pytest.approx([1 / 3, 1 / 3, 0.0, 0.0])


async def test_random_voters_are_not_paid_for_critique_under_robust_and_are_under_the_paper() -> None:
    def noise(seed: int) -> Behaviour:
        rng = random.Random(seed)
        return but(HONEST, verdict=lambda place: ranking_of(_others(place), key=lambda _: rng.randrange(99)))

    paid = {"paper": 0.0, "robust": 0.0}
    for seed, (name, rules) in itertools.product(range(8), [("paper", PAPER), ("robust", ROBUST)]):
        rewards = await streams({agent_id: noise(4 * seed + agent_id) for agent_id in range(4)}, rules=rules)
        paid[name] += sum(agent["r_diag"] or 0.0 for agent in rewards.values()) / 32
    assert paid["robust"] == 0.0
    assert paid["paper"] > 0.2


@BOTH
async def test_a_silent_agent_is_ranked_last_and_votes_for_nobody(rules: ReviewRules) -> None:
    agents = everyone(HONEST) | {3: lambda place: silent()}
    outcome, builder, _ = await play(agents, rules=rules)
    rewards = streams_of(builder)
    assert min(rewards, key=lambda agent_id: rewards[agent_id]["r_sol"]) == 3
    assert rewards[3]["r_meta"] is None
    assert rewards[3]["r_diag"] == 0.0
    assert metrics_of(outcome)[3]["parsing_failures"] == 5
    assert metrics_of(outcome)[0]["judge/verdict/invalid_rate"] == 0.25
    spans = (builder.credit() or pytest.fail("no credit")).spans
    assert {(span.stream, span.round_index) for span in spans if span.seat in (6, 7)} == {
        ("r_sol", 0),
        ("r_sol", 2),
    }


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
    assert rewards[0]["r_sol"] < 0.5 < rewards[2]["r_sol"]
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

    def flaky(place: Place) -> Reply | str:
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

        def stormy(place: Place) -> Reply | str:
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


# credit


async def credited(
    agents: Mapping[int, Behaviour], rules: ReviewRules = ROBUST
) -> tuple[GroupOutcome, CritiqueSelfPlayEnvGroupBuilder, ReviewScores, dict[tuple[int, int], list[Any]]]:
    """One conversation, its scores again, and its spans by (seat, transition)."""
    outcome, builder, _ = await play(agents, rules=rules)
    spans: dict[tuple[int, int], list[Any]] = {}
    for span in (builder.credit() or pytest.fail("no credit")).spans:
        spans.setdefault((span.seat, span.transition), []).append(span)
    return outcome, builder, SCORED[-1], spans


SCORED: list[ReviewScores] = []
"""What the builders of these tests computed last."""


@pytest.fixture(autouse=True)
def _keep_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(*arguments: Any) -> ReviewScores:
        SCORED.append(score_review(*arguments))
        return SCORED[-1]

    monkeypatch.setattr(critique, "score_review", kept)


CHANGING = but(IMPROVING, revision=lambda p: f"Revise: quality {10 * p.agent_id + 1} by {p.agent_id}")


@BOTH
async def test_each_segment_earns_its_own_stream_and_the_blind_ranking_none(rules: ReviewRules) -> None:
    outcome, _, scores, spans = await credited(everyone(CHANGING), rules)
    assert outcome.group is not None
    for agent_id in range(4):
        lane_0 = outcome.group.trajectories_G[2 * agent_id].transitions
        earned = {
            0: ("r_sol", scores.r_sol_initial),
            2: ("r_sol", scores.r_sol),
            3: ("r_meta", scores.r_meta),
        }
        assert len(lane_0) == 4
        assert (2 * agent_id, 1) not in spans  # the ranking
        for transition, (stream, reward) in earned.items():
            (span,) = spans[2 * agent_id, transition]
            assert (span.start, span.stop) == (0, len(lane_0[transition].ac.tokens))
            assert (span.stream, span.round_index) == (stream, transition)
            assert span.reward == reward[agent_id]


def test_the_tokens_of_a_critique_earn_the_gain_of_its_target() -> None:
    outcome, builder, scores, spans = asyncio.run(credited(everyone(CHANGING)))
    assert outcome.group is not None
    assert len({round(gain.paid, 6) for gain in scores.gains.values()}) >= 3
    turns = [turn for turn in (builder.record() or {})["turns"] if turn["segment"] == "critique"]
    for turn in turns:
        seat = 2 * turn["agent_id"] + 1
        tokens = outcome.group.trajectories_G[seat].transitions[0].ac.tokens
        found = spans[seat, 0]
        assert len(found) == 3
        for span, said in zip(found, turn["response"]["critiques"], strict=True):
            assert (
                RENDERER.tokenizer.decode(tokens[span.start : span.stop])
                == turn["text"][said["start"] : said["stop"]]
            )
            assert (span.stream, span.round_index) == ("r_diag", 1)
            assert span.reward == scores.gains[said["target"]].paid
            assert said["target"] != turn["agent_id"]


def test_under_the_paper_a_whole_critique_reply_earns_the_sum() -> None:
    outcome, _, scores, spans = asyncio.run(credited(everyone(CHANGING), PAPER))
    assert outcome.group is not None
    for agent_id in range(4):
        (span,) = spans[2 * agent_id + 1, 0]
        tokens = outcome.group.trajectories_G[2 * agent_id + 1].transitions[0].ac.tokens
        assert (span.start, span.stop, span.reward) == (0, len(tokens), scores.r_diag[agent_id])


@BOTH
@pytest.mark.parametrize(
    "said",
    [
        "",
        "They are all fine.",
        "Critique of Z: wrong",
        "Critique of {own}: mine is best",
        "Critique of {other}:",
    ],
)
async def test_a_critique_that_is_missing_or_names_nobody_earns_nothing(
    rules: ReviewRules, said: str
) -> None:
    mute = but(CHANGING, critique=lambda place: said.format(own=place.own, other=place.others[0]))
    outcome, builder, scores, spans = await credited(everyone(CHANGING) | {2: mute}, rules)
    assert scores.r_diag[2] == 0.0
    assert (5, 0) not in spans
    assert {(1, 0), (3, 0), (7, 0)} <= set(spans)
    assert metrics_of(outcome)[2]["critiques/given"] == 0
    assert streams_of(builder)[2]["r_diag"] == 0.0


async def test_text_between_critiques_and_repeated_ones_earn_nothing() -> None:
    def chatty(place: Place) -> str:
        a, b, _ = place.others
        return f"Let me see.\nCritique of {a}: one é\nCritique of {b}: two\nCritique of {a}: again\n"

    outcome, _, _, spans = await credited(everyone(CHANGING) | {0: but(CHANGING, critique=chatty)})
    assert outcome.group is not None
    tokens = outcome.group.trajectories_G[1].transitions[0].ac.tokens
    pieces = [RENDERER.tokenizer.decode(tokens[span.start : span.stop]) for span in spans[1, 0]]
    assert [piece.split(": ")[1] for piece in pieces] == ["one é", "two"]


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
        *("question", "answer", "protocol", "num_agents", "max_rounds", "turns", "failures", "comparisons"),
        *("rewards", "correct", "correct_initial", "rules", "scores", "streams"),
    }
    assert (record["protocol"], record["num_agents"], record["max_rounds"]) == ("critique_self_play", 4, 4)
    assert len(record["turns"]) == 20
    assert record["rules"]["weights"] == {"r_sol": 1.0, "r_meta": 1.0, "r_diag": 2.0}
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
    for figure in ("accuracy", "invalid_rate", "tie_rate", "cyclic_triads", "order_flips")
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
        HONEST, verdict=lambda place: ranking_of(_others(place), key=lambda text: -_quality(text))
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
