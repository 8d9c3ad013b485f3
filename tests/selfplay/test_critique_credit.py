"""Which sampled tokens of a critique conversation earn what."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from review_agents import (
    BOTH,
    CHANGING,
    PAPER,
    RENDERER,
    ROBUST,
    Behaviour,
    Place,
    but,
    everyone,
    metrics_of,
    play,
    streams_of,
)

from viva.rewards import critique
from viva.rewards.review import ReviewRules, ReviewScores, score_review
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.training.rollouts import GroupOutcome

# credit


async def credited(
    agents: Mapping[int, Behaviour], rules: ReviewRules = ROBUST
) -> tuple[
    GroupOutcome, MultiAgentConversationEnvGroupBuilder, ReviewScores, dict[tuple[int, int], list[Any]]
]:
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
