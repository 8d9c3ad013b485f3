"""Conversations in which agents vote by label probabilities: who is asked what, what counts, what is paid."""

import asyncio
import itertools
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from review_agents import (
    CHANGING,
    HONEST,
    IMPROVING,
    PAPER,
    RENDERER,
    ROBUST,
    but,
    column,
    crashing_at,
    everyone,
    larger_wins,
    metrics_of,
    play,
    quality,
    streams_of,
)

import viva
from viva.conversation.critiques import label_vote
from viva.conversation.protocol import Protocol, Round, Segment
from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge
from viva.judging.ranking import LabelBallot
from viva.judging.records import ConversationRecord
from viva.rewards import r_meta, r_sol
from viva.selfplay.check import check_protocol, dry_runs
from viva.selfplay.controls import controlled
from viva.selfplay.critique import critique_protocol
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.testing import ScriptedPolicy, ScriptedSamplingClient
from viva.training.rollouts import run_group

REVIEWED = ("proposal", "critique", "revision")


def voter_of(next_token=larger_wins) -> tuple[PolicySelfComparisonJudge, ScriptedSamplingClient]:
    client = ScriptedSamplingClient(renderer=RENDERER, next_token=next_token)
    return PolicySelfComparisonJudge(PolicyRef(sampling_client=client), RENDERER), client


async def play_labels(agents, next_token=larger_wins, **options):
    """A conversation with votes by label probabilities, and the client that was asked for them."""
    voter, client = voter_of(next_token)
    outcome, builder, population = await play(agents, ballots="labels", voter=voter, **options)
    return outcome, builder, population, client


def record_of(builder) -> ConversationRecord:
    return ConversationRecord.model_validate(builder.record())


def ballots_in(record: ConversationRecord, segment: str) -> dict[int, LabelBallot]:
    found = {turn.agent_id: turn.response for turn in record.turns if turn.segment == segment}
    assert all(isinstance(ballot, LabelBallot) for ballot in found.values())
    return found  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("num_agents", [3, 4])
async def test_every_voter_has_one_vote_on_every_pair_of_the_others(num_agents) -> None:
    _, builder, population, client = await play_labels(everyone(HONEST, num_agents))
    record = record_of(builder)
    for segment in ("ranking", "verdict"):
        for voter, ballot in ballots_in(record, segment).items():
            others = [agent for agent in range(num_agents) if agent != voter]
            pairs = [{vote.winner, vote.loser} for vote in ballot.preferences]
            assert sorted(map(sorted, pairs)) == [list(pair) for pair in itertools.combinations(others, 2)]
            orders = [(answer.first, answer.second) for answer in ballot.answers]
            assert sorted(orders) == sorted(itertools.permutations(others, 2))
    asked = 2 * num_agents * (num_agents - 1) * (num_agents - 2)
    assert len(client.prompts) == asked
    assert all(set(segments) == set(REVIEWED) for segments in population.asked.values())


async def test_a_voter_is_asked_as_the_agent_and_sees_the_pair_alone() -> None:
    _, builder, _, client = await play_labels(everyone(HONEST))
    voters = Counter[str]()
    for prompt in client.prompts:
        (voter,) = re.findall(r"You are number (\d)\. Which solution is better", prompt)
        shown = re.findall(r"by (\d)\n", prompt)
        assert len(set(shown)) == 2
        assert voter not in shown
        assert builder.protocol.system_prompt in prompt
        assert "Solution C" not in prompt
        assert "Critique" not in prompt
        voters[voter] += 1
    assert len(set(voters.values())) == 1


async def test_nothing_of_a_ballot_is_sampled_credited_or_paid() -> None:
    outcome, builder, _, _ = await play_labels(everyone(IMPROVING))
    assert outcome.group is not None
    assert column(builder, "r_meta") == [None] * 4
    lengths = [len(each.transitions) for each in outcome.group.trajectories_G]
    assert lengths == [2, 1] * 4  # proposal and revision; critique
    credit = builder.credit()
    assert credit is not None
    assert {span.stream for span in credit.spans} == {"r_sol", "r_diag"}
    texts = {(turn.agent_id, turn.segment): turn.text for turn in record_of(builder).turns}
    for span in credit.spans:
        agent_id, lane = divmod(span.seat, 2)
        turn = outcome.group.trajectories_G[span.seat].transitions[span.transition]
        segment = REVIEWED[1] if lane else REVIEWED[2 * span.transition]
        said = RENDERER.tokenizer.decode(turn.ac.tokens[span.start : span.stop])
        assert said.removesuffix("<|im_end|>").strip() in texts[agent_id, segment]
    metrics = metrics_of(outcome)[0]
    assert metrics["judge/verdict/sampled"] == 0.0
    assert "judge/verdict/order_flips" not in metrics


async def test_certain_voters_score_as_those_who_write() -> None:
    for rules in (PAPER, ROBUST):
        _, labelled, _, _ = await play_labels(everyone(CHANGING), rules=rules)
        _, written, _ = await play(everyone(CHANGING), rules=rules)
        assert column(labelled, "r_sol") == pytest.approx(column(written, "r_sol"), abs=1e-6)
        assert column(labelled, "r_diag") == pytest.approx(column(written, "r_diag"), abs=1e-6)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.02, 0.98))
def test_a_preference_for_the_first_pays_everybody_alike(chance) -> None:
    async def run() -> None:
        outcome, builder, _, _ = await play_labels(
            everyone(HONEST), lambda prompt: {"A": chance, "B": 1 - chance}, rules=PAPER
        )
        assert column(builder, "r_sol") == pytest.approx([0.5] * 4)
        bias = metrics_of(outcome)[0]["judge/ranking/position_bias"]
        assert bias == (0.0 if abs(chance - 0.5) < 1e-9 else 1.0)

    asyncio.run(run())


async def test_a_bias_for_the_first_does_not_hide_which_is_better() -> None:
    def biased(prompt: str) -> dict[str, float]:
        first, second = (quality(text) for text in re.findall(r"^Solution [AB]:\n>(.*)$", prompt, re.M))
        return {"A": 0.9, "B": 0.1} if first > second else {"A": 0.8, "B": 0.2}

    _, builder, _, _ = await play_labels(everyone(HONEST), biased)
    scores = column(builder, "r_sol")
    assert scores == sorted(scores)
    assert len(set(scores)) == 4
    assert max(scores) < 0.6  # a lean of a tenth is no certainty


async def test_solutions_with_the_same_words_are_not_asked_about() -> None:
    same = but(HONEST, proposal="quality 1", revision="Defend: quality 1")
    outcome, builder, _, client = await play_labels(everyone(same))
    assert outcome.void_reason is None
    assert not client.prompts
    assert column(builder, "r_sol") == [0.5] * 4


async def test_of_two_agents_each_votes_on_both() -> None:
    _, builder, _, client = await play_labels(everyone(HONEST, 2))
    assert len(client.prompts) == 8
    low, high = column(builder, "r_sol")
    assert low < high


async def test_agents_compare_first_and_revised_solutions_by_labels() -> None:
    outcome, builder, _, _ = await play_labels(everyone(IMPROVING), judge=None)
    assert outcome.void_reason is None
    for voter, ballot in ballots_in(record_of(builder), "comparison").items():
        names = {item for answer in ballot.answers for item in (answer.first, answer.second)}
        others = [agent for agent in range(4) if agent != voter]
        assert names == {(stage, agent) for stage in ("initial", "revised") for agent in others}
    assert min(metric["gain/mean"] for metric in metrics_of(outcome)) > 0


@pytest.mark.parametrize("rules", [PAPER, ROBUST], ids=["paper", "robust"])
async def test_a_stored_conversation_is_scored_again_as_it_was(rules) -> None:
    _, builder, _, _ = await play_labels(everyone(CHANGING), rules=rules)
    again = ConversationRecord.model_validate_json(record_of(builder).model_dump_json())
    assert again.streams == streams_of(builder)
    assert await viva.rewards.peer_review().stored_pay(again, 0) == pytest.approx(again.rewards)


async def test_a_vote_that_cannot_be_had_ends_the_agent_and_nobody_waits() -> None:
    def failing(prompt: str) -> dict[str, float]:
        return {} if "You are number 2." in prompt else larger_wins(prompt)

    outcome, _, _, _ = await asyncio.wait_for(play_labels(everyone(HONEST), failing, on_failure="void"), 20)
    assert outcome.group is None
    assert {failure.error_type for failure in outcome.failures if failure.seat is not None} == {"JudgeError"}
    outcome, builder, _, _ = await asyncio.wait_for(
        play_labels(everyone(HONEST), failing, on_failure="continue"), 20
    )
    assert 4 in outcome.failed_seats
    assert [failure.agent_id for failure in record_of(builder).failures] == [2]
    assert set(streams_of(builder)) == {0, 1, 3}


async def test_an_agent_that_fails_is_not_voted_on() -> None:
    agents = {**everyone(IMPROVING), 1: crashing_at(IMPROVING, "revision")}
    _, builder, _, _ = await play_labels(agents, on_failure="continue")
    for ballot in ballots_in(record_of(builder), "verdict").values():
        assert all(1 not in (answer.first, answer.second) for answer in ballot.answers)


async def test_pairs_beyond_the_labels_are_invalid_and_counted() -> None:
    outcome, builder, _, _ = await play_labels(everyone(HONEST), lambda prompt: {"X": 0.99, "A": 0.01})
    metrics = metrics_of(outcome)[0]
    assert metrics["judge/ranking/invalid_rate"] == 1.0
    assert column(builder, "r_sol") == [0.5] * 4
    assert all(
        ballot.dropped == {"invalid": 3} for ballot in ballots_in(record_of(builder), "verdict").values()
    )


# protocols of one's own

VOTED = Protocol(
    rounds=(
        Round("answer", "Say a quality."),
        Round("vote", [label_vote("vote")], ["answer"]),
    ),
    reward=lambda conversation: {
        agent: float(sum(vote.winner == agent for votes in _votes(conversation) for vote in votes))
        for agent in range(conversation.num_agents)
    },
    name="voted",
)


def _votes(conversation):
    return [turn.response.preferences for turn in conversation.turns if turn.segment == "vote"]


async def test_a_protocol_of_ones_own_can_vote_without_words() -> None:
    voter, client = voter_of(lambda prompt: larger_wins(prompt.replace("> quality", ">quality")))
    builder = MultiAgentConversationEnvGroupBuilder(
        question="Which?",
        renderer=RENDERER,
        protocol=VOTED,
        reward=viva.rewards.find_reward(VOTED.reward)
        if hasattr(viva.rewards, "find_reward")
        else VOTED.reward,
        voter=voter,
        num_agents=3,
    )

    class Seats:
        def seat(self, *, group: int, attempt: int, seat: int) -> ScriptedPolicy:
            return ScriptedPolicy(renderer=RENDERER, script=lambda prompt, call: f"quality {seat}")

    outcome = await run_group(builder, Seats(), max_retries=0)
    assert outcome.group is not None
    assert outcome.group.final_rewards_G == [0.0, 1.0, 2.0]
    assert [len(each.transitions) for each in outcome.group.trajectories_G] == [1, 1, 1]
    assert len(client.prompts) == 6


def test_a_protocol_with_label_votes_is_played_without_a_model() -> None:
    for protocol in (VOTED, critique_protocol(3, ballots="labels", comparisons=True)):
        lines, problems = check_protocol(protocol, 3)
        assert not problems
        assert any("has, by label probabilities, the votes of" in line for line in lines)
    honest = dry_runs(VOTED, 3)[0].conversation
    assert [len(votes) for votes in _votes(honest)] == [1, 1, 1]


def test_votes_without_words_earn_nothing_and_need_the_policy() -> None:
    segment = Segment(**{**_fields(label_vote("vote")), "stream": "reward"})
    wrong = Protocol(rounds=(Round("answer", "Say."), Round("vote", [segment], ["answer"])))
    with pytest.raises(ValueError, match="votes without words, and nobody earns what was not sampled"):
        wrong.check()
    with pytest.raises(ValueError, match="has votes by label probabilities, which need the policy; got none"):
        MultiAgentConversationEnvGroupBuilder(
            question="?",
            renderer=RENDERER,
            protocol=critique_protocol(3, ballots="labels"),
            reward=r_sol(preset="paper"),
            num_agents=3,
        )


def test_a_seat_that_would_only_vote_is_refused() -> None:
    say = Segment(name="say", instruction=lambda view: "Say more.", stream=None)
    wrong, right = (
        Protocol(rounds=(Round("answer", "Say."), Round("both", segments, ["answer"])))
        for segments in ([say, label_vote("vote")], [label_vote("vote"), say])
    )
    with pytest.raises(
        ValueError, match="at place 2 of their rounds, 'vote', none is written: put them first"
    ):
        wrong.check()
    right.check()


def _fields(segment: Segment) -> dict[str, object]:
    return {name: getattr(segment, name) for name in Segment.__dataclass_fields__}


def test_r_meta_alone_has_nothing_to_pay() -> None:
    labelled = critique_protocol(4, ballots="labels")
    with pytest.raises(ValueError, match="of which no token is sampled; use ballots=written"):
        r_meta().check(labelled, 4)
    r_meta().check(critique_protocol(4), 4)


def test_controls_leave_votes_their_sights() -> None:
    protocol = controlled(critique_protocol(3, ballots="labels"), "no_exchange", 3)
    shown = {round_.name: [sight.segments for sight in round_.sights] for round_ in protocol.rounds}
    assert shown["verdict"] == [("revision",)]
    assert shown["revise"] == [("proposal",)]


def test_other_words_are_put_behind_each_pair() -> None:
    protocol = critique_protocol(3, ballots="labels").with_prompts({"verdict": "{persona} A or B?"})
    (segment,) = protocol.rounds[3].segments
    assert segment.votes_on is not None
    (written,) = critique_protocol(3).rounds[3].segments
    assert written.votes_on is None
