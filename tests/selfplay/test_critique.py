"""Critique self-play end to end: what scripted populations earn by it."""

import itertools
import random

import pytest
from review_agents import (
    BOTH,
    HONEST,
    IMPROVING,
    PAPER,
    ROBUST,
    Behaviour,
    Place,
    but,
    column,
    everyone,
    honest,
    metrics_of,
    others_of,
    play,
    quality,
    ranking_of,
    streams,
    streams_of,
)

from viva.rewards.review import ReviewRules
from viva.testing import silent

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
    fickle = but(HONEST, verdict=lambda place: ranking_of(others_of(place), key=lambda text: -quality(text)))
    paper, robust = [await streams(everyone(fickle), rules=rules) for rules in (PAPER, ROBUST)]
    assert [agent["r_diag"] for agent in robust.values()] == [0.0] * 4
    # 0 and 1 rise from .239 and .408 to .761 and .592; each critic is paid for both, or for the other one
    assert [agent["r_diag"] for agent in paper.values()] == pytest.approx(
        [0.184, 0.523, 0.707, 0.707], abs=2e-3
    )


async def test_one_that_rises_by_critique_pays_its_critics_under_both_presets() -> None:
    rising = but(HONEST, revision=lambda place: f"Revise: quality {quality(place.own_solution) + 10} by 0")
    agents = everyone(HONEST) | {0: rising}
    paper, robust = [await streams(agents, rules=rules) for rules in (PAPER, ROBUST)]
    assert [agent["r_diag"] for agent in paper.values()] == pytest.approx(
        [0.0, 0.523, 0.523, 0.523], abs=2e-3
    )
    assert robust[0]["r_diag"] == 0.0
    assert all(
        0.15 < robust[critic]["r_diag"] < 0.25 for critic in (1, 2, 3)
    )  # a third: two targets gained nothing


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


@BOTH
async def test_a_pair_is_paid_for_agreeing_on_the_two_others_alone(rules: ReviewRules) -> None:
    rewards = await streams(with_colluding_pair("2 > 3"), rules=rules)
    # only the pair votes on (2, 3), and agrees there; on all else one of it disagrees with an honest one
    assert [agent["r_meta"] for agent in rewards.values()] == pytest.approx([1 / 3, 1 / 3, 0.0, 0.0])


async def test_random_voters_are_not_paid_for_critique_under_robust_and_are_under_the_paper() -> None:
    def noise(seed: int) -> Behaviour:
        rng = random.Random(seed)
        return but(
            HONEST, verdict=lambda place: ranking_of(others_of(place), key=lambda _: rng.randrange(99))
        )

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
