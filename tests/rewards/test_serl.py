"""Copeland scores and the judge's consistency: closed forms, a judge and agents whose votes are known."""

import asyncio
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from review_agents import (
    CHANGING,
    HONEST,
    Population,
    builder_of,
    but,
    everyone,
    honest,
    larger_wins,
    quality,
)
from solved import solutions

import viva
from viva.judging.ballots import Preference, Tie
from viva.judging.comparison import Comparison, NoValidComparisonsError, Outcome
from viva.judging.judge import JudgeOptions, PolicyRef, PolicySelfComparisonJudge
from viva.rewards.base import Models
from viva.rewards.serl import consistency, copeland, judgement_of
from viva.testing import ScriptedSamplingClient, tiny_renderer
from viva.training.rollouts import run_group

RENDERER = tiny_renderer()
TEXTS = {0: "aaaa", 1: "bbbb", 2: "cccc", 3: "dddd"}


def both_ways(order):
    """Judgements of all pairs, those earlier in an order winning."""
    return [Preference(*sorted(pair, key=order.index)) for pair in itertools.permutations(order, 2)]


@given(st.permutations(range(4)))
def test_a_linear_order_has_evenly_spaced_scores_and_a_judge_without_fault(order):
    scores = copeland(both_ways(order), TEXTS)
    assert [scores[each] for each in order] == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert consistency(both_ways(order), scores) == 1.0


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_relabelling_permutes_the_scores(order, names):
    scores = copeland(both_ways(order), TEXTS)
    renamed = copeland(both_ways([names[each] for each in order]), TEXTS)
    assert renamed == {names[each]: score for each, score in scores.items()}


def test_a_cycle_makes_all_equal_and_no_judgement_right():
    cycle = [Preference(0, 1), Preference(1, 2), Preference(2, 0)]
    scores = copeland(cycle, {each: TEXTS[each] for each in range(3)})
    assert set(scores.values()) == {0.5}
    assert consistency(cycle, scores) == 0.0


def test_a_tie_is_half_a_win_and_what_cannot_be_read_costs_the_judge_alone():
    judgements = [Tie(0, 1), None, Preference(0, 2)]
    texts = {each: TEXTS[each] for each in range(3)}
    scores = copeland(judgements, texts)
    assert scores == {0: 0.75, 1: 0.5, 2: 0.0}
    assert consistency(judgements, scores) == pytest.approx((0 - 1 + 1) / 3)
    assert copeland([None], TEXTS) == {}
    assert consistency([], scores) is None


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=8))
def test_a_judge_that_knows_nothing_pays_no_answer_for_being_rare(answers):
    texts = dict(enumerate(answers))
    judgements = [  # a judge that prefers the first place; the same words tie
        Tie(one, other) if texts[one] == texts[other] else Preference(one, other)
        for one, other in itertools.permutations(texts, 2)
    ]
    assert set(copeland(judgements, texts).values()) == {0.5}


@pytest.mark.parametrize(
    ("length", "worth"), [(10, 1.0), (9, 10 / 9), (11, 10 / 11), (8, 0.0), (12, 0.0), (30, 0.0)]
)
def test_a_win_over_an_answer_of_another_length_counts_less_or_nothing(length, worth):
    texts = {0: "x" * length, 1: "y" * 10}
    assert copeland([Preference(0, 1)], texts)[0] == pytest.approx(worth)
    assert copeland([Preference(0, 1)], texts, None)[0] == 1.0


def asked(texts, next_token, **options):
    client = ScriptedSamplingClient(renderer=RENDERER, next_token=next_token)
    judge = PolicySelfComparisonJudge(PolicyRef(sampling_client=client), RENDERER, JudgeOptions(**options))
    return asyncio.run(viva.rewards.serl().ask(solutions(texts), "Which?", Models(judge=judge)))


def test_samples_are_paid_by_what_the_judge_says_in_both_orders():
    group = asked([f"quality {number} by 0" for number in (3, 1, 2)], larger_wins)
    assert viva.rewards.serl().pay(group) == [1.0, 0.0, 0.5]
    figures = viva.rewards.serl().figures(group)
    assert figures["serl/judge_consistency"] == 1.0
    assert figures["judge/position_bias"] == 0.0
    assert len(viva.rewards.serl().told(group)["comparisons"]) == 6


def test_a_judge_that_prefers_a_place_pays_all_alike_and_is_half_wrong():
    group = asked(["one", "two"], lambda prompt: {"A": 0.9, "B": 0.05, "T": 0.05})
    assert viva.rewards.serl().pay(group) == [0.5, 0.5]
    assert viva.rewards.serl().figures(group)["serl/judge_consistency"] == 0.0


def test_where_nothing_could_be_read_there_is_no_reward():
    group = asked(["one", "two"], lambda prompt: {"x": 1.0})
    with pytest.raises(NoValidComparisonsError, match="agents \\[0, 1\\] have no valid comparison"):
        viva.rewards.serl().pay(group)
    with pytest.raises(ValueError, match="needs comparisons of the solutions in pairs"):
        viva.rewards.serl().pay(solutions(["one", "two"]))
    with pytest.raises(ValueError, match="'serl' needs a judge; got none"):
        asyncio.run(viva.rewards.serl().ask(solutions(["a"]), "q", Models()))
    assert viva.rewards.serl().pay(asked(["alone"], larger_wins)) == [0.0]


def test_comparisons_are_read_as_judgements():
    tie, first, unread = (
        Comparison(first=3, second=5, outcome=outcome, score=score)
        for outcome, score in ((Outcome.TIE, 0.0), (Outcome.A, -1.0), (Outcome.INVALID, None))
    )
    second = replace(first, outcome=Outcome.B)
    assert [*map(judgement_of, (tie, first, second, unread))] == [
        Tie(3, 5), Preference(3, 5), Preference(5, 3), None,
    ]  # fmt: skip


def test_options():
    assert viva.rewards.serl(judge=JudgeOptions(policy="initial")).judge.policy == "initial"
    assert viva.rewards.serl_votes().judge is None
    for make in (viva.rewards.serl, viva.rewards.serl_votes):
        with pytest.raises(ValueError, match="length_band must be above 0 and below 1"):
            make(length_band=1.0)


async def votes(agents, **options):
    builder = replace(builder_of(len(agents), **options), reward=viva.rewards.serl_votes(), judge=None)
    outcome = await run_group(builder, Population(agents=agents), max_retries=0)
    return outcome, builder


async def test_agents_are_paid_for_solutions_and_for_agreeing_with_all_votes():
    outcome, builder = await votes(everyone(HONEST))
    rewards_G = outcome.group.final_rewards_G
    record = builder.record()["serl"]
    final = [record[agent]["final"] for agent in sorted(record)]
    assert final == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert [record[agent]["initial"] for agent in sorted(record)] == pytest.approx(final)
    assert {own["judge"] for own in record.values()} == {1.0}
    assert rewards_G[::2] == pytest.approx([score + 1 for score in final])
    assert rewards_G[1::2] == [0.0] * 4
    spans = builder.credit().spans
    assert {(span.stream, span.round_index) for span in spans} == {("r_sol", 0), ("r_sol", 2), ("r_meta", 3)}
    assert outcome.group.metrics_G[0]["agent_0/reward"] == rewards_G[0]


async def test_a_voter_against_all_others_and_one_without_a_word_are_not_paid():
    sane = honest({agent: agent + 1 for agent in range(6)})
    upside_down = but(
        sane,
        verdict=lambda place: (
            "Ranking: " + " > ".join(sorted(place.others, key=lambda letter: quality(place.letters[letter])))
        ),
    )
    mute = but(sane, verdict="I cannot say.")
    _, builder = await votes({**everyone(sane, 6), 2: upside_down, 3: mute})
    record = builder.record()["serl"]
    judged = {int(agent): own["judge"] for agent, own in record.items()}
    assert (judged[2], judged[3]) == (-1.0, -1.0)
    assert {judged[each] for each in (0, 1, 4, 5)} == {1.0}


async def test_a_conversation_without_votes_is_void():
    outcome, _ = await votes(everyone(but(CHANGING, verdict="Nothing.")))
    assert "no vote that could be read is about the revisions of agents [0, 1, 2, 3]" in outcome.void_reason


def test_a_protocol_without_ballots_is_refused():
    protocol = viva.Protocol(rounds=[viva.Round("first", "Say it.")])
    with pytest.raises(
        ValueError, match=r"'serl_votes' pays solutions and the votes on them.*does not ask for"
    ):
        viva.rewards.serl_votes().check(protocol, 3)
