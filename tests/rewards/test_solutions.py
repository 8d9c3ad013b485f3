"""Rewards of solutions: majority, log-probability, known answers, and any of them shuffled."""

import asyncio
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from solved import solutions

import viva
from viva import Protocol, Round, Segment
from viva.conversation.protocol import Reading
from viva.conversation.records import Reply, ReplyStatus
from viva.judging.answers import answer_groups, is_correct
from viva.judging.records import ConversationRecord
from viva.rewards.credit import GroupCredit, SpanCredit, group_advantages
from viva.rewards.shuffled import permuted, shuffled_credit
from viva.selfplay.check import dry_runs
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.testing import ScriptedPolicy, ScriptedReply, tiny_renderer
from viva.training.rollouts import run_group

RENDERER = tiny_renderer()


answers = st.lists(st.integers(0, 3), min_size=1, max_size=8)


def said(number):
    return f"I add. The answer is {number}."


@given(answers)
def test_the_majority_is_paid_and_ties_share(numbers):
    counts = Counter(numbers)
    top = [number for number, count in counts.items() if count == max(counts.values())]
    found = viva.rewards.majority().pay(solutions([said(number) for number in numbers]))
    assert found == [1 / len(top) if number in top else 0.0 for number in numbers]


@given(answers, st.randoms())
def test_permuting_the_solutions_permutes_the_majoritys_pay(numbers, rng):
    order = list(range(len(numbers)))
    rng.shuffle(order)
    pay = viva.rewards.majority().pay
    plain = pay(solutions([said(number) for number in numbers]))
    assert pay(solutions([said(numbers[index]) for index in order])) == [plain[index] for index in order]


@given(st.integers(1, 6))
def test_where_all_answers_differ_or_agree_nothing_is_trained(count):
    pay = viva.rewards.majority().pay
    assert group_advantages(pay(solutions([said(number) for number in range(count)]))) == [0.0] * count
    assert group_advantages(pay(solutions([said(7)] * count))) == [0.0] * count


def test_answers_are_grouped_by_equivalence_and_not_by_spelling():
    texts = ["\\boxed{x/2}", "\\boxed{0.5x}", "\\boxed{x}", "The answer is 1/2", "so it is 0.5", ""]
    one, same, other, half, also_half, nothing = answer_groups(texts)
    assert one == same
    assert half == also_half
    assert len({one, other, half}) == 3
    assert nothing is None


def test_a_cut_reply_neither_votes_nor_earns():
    group = solutions([said(1), said(1), said(2)], finished=[True, False, True])
    assert viva.rewards.majority().pay(group) == [0.5, 0.0, 0.5]
    cut = solutions([said(1), said(2)], finished=[False, False])
    assert viva.rewards.majority().pay(cut) == [0.0, 0.0]
    assert viva.rewards.majority().figures(cut) == {}


def test_proposals_may_be_the_voters():
    group = solutions([said(2), said(2), said(1)], first=[said(1), said(1), said(2)], answer="2")
    assert viva.rewards.majority().pay(group) == [1.0, 1.0, 0.0]
    assert viva.rewards.majority(voters="first").pay(group) == [0.0, 0.0, 1.0]
    assert viva.rewards.majority().figures(group) == {"majority/share": 2 / 3, "majority/correct": 1.0}
    with pytest.raises(ValueError, match="voters must be 'final' or 'first'; got 'all'"):
        viva.rewards.majority(voters="all")
    by_name = viva.rewards.find_reward("majority_first")
    assert by_name == viva.rewards.majority(voters="first") != viva.rewards.majority()
    assert (by_name.name, by_name.pay(group)) == ("majority_first", [0.0, 0.0, 1.0])
    assert not by_name.pays_samples


def final_by_agent(builder):
    """Agents' rewards by the last number that each said."""
    record = ConversationRecord.model_validate(builder.record())
    final = record.conversation().final_solutions
    return {text[-2]: record.rewards[agent] for agent, text in final.items()}


def test_a_proposal_that_was_cut_does_not_vote():
    def script(prompt, call):
        return ScriptedReply(text=said([7, 7, 2, 7, 7, 2][call]), ended=call not in (0, 1))

    builder, group = talk(viva.rewards.majority(voters="first"), script)
    assert group.metrics_G[0]["majority/share"] == 1.0
    assert final_by_agent(builder) == {"7": 0.0, "2": 1.0}


def test_the_label_of_proposals_is_right_also_where_all_gave_it_up():
    _, group = talk(
        viva.rewards.majority(voters="first"), lambda prompt, call: said([2, 2, 2, 3, 3, 3][call])
    )
    assert group.get_total_rewards() == [0.0] * 3
    assert group.metrics_G[0]["majority/correct"] == 1.0


def test_the_last_reply_decides_whether_a_solution_is_finished_whatever_stood_in_other_lanes():
    """A sketch beside the first plan was cut, and the final solution, in the plan's lane, was not."""
    draft = [
        Segment(name=name, instruction=lambda view, name=name: f"{name}!") for name in ("plan", "sketch")
    ]
    builder = MultiAgentConversationEnvGroupBuilder(
        question="1 + 1?",
        renderer=RENDERER,
        protocol=Protocol(rounds=[Round("draft", draft), Round("final", "Last!", ["plan"])]),
        reward=viva.rewards.majority(),
        num_agents=2,
    )

    def script(prompt, call):
        return ScriptedReply(text=said(2), ended="sketch!" not in prompt)

    group = asyncio.run(run_group(builder, ScriptedPolicy(renderer=RENDERER, script=script))).group
    assert builder.record()["rewards"] == {"0": 1.0, "1": 1.0}
    assert group.metrics_G[0]["majority/share"] == 1.0


@given(st.lists(st.lists(st.floats(-20, 0), min_size=1, max_size=5), min_size=1, max_size=5))
def test_the_log_probability_is_the_mean_over_the_tokens(logprobs):
    group = solutions(["a"] * len(logprobs), logprobs=logprobs)
    assert viva.rewards.log_probability().pay(group) == pytest.approx([np.mean(own) for own in logprobs])


def test_what_is_not_known_is_no_reward():
    with pytest.raises(ValueError, match="'log_probability' needs the sampling logprobs"):
        viva.rewards.log_probability().pay(solutions(["a"]))
    with pytest.raises(ValueError, match="replies of at least one token"):
        viva.rewards.log_probability().pay(solutions(["a", "b"], logprobs=[[-1.0], []]))
    with pytest.raises(ValueError, match="'answers' needs a known answer"):
        viva.rewards.answers().pay(solutions(["a"]))
    with pytest.raises(ValueError, match="'tournament' pays conversations"):
        viva.rewards.shuffled("tournament").pay(solutions(["a"]))


@given(answers, st.integers(0, 2**31))
def test_shuffling_keeps_the_rewards_of_the_group_and_follows_the_seed(numbers, seed):
    group = solutions([said(number) for number in numbers], answer="1", seed=seed)
    found = viva.rewards.shuffled().pay(group)
    assert sorted(found) == sorted(viva.rewards.answers().pay(group))
    assert found == viva.rewards.shuffled().pay(group)


def test_a_shuffled_reward_says_nothing_about_who_earned_it():
    means = np.mean([permuted([1.0, 0.0, 0.0, 0.0], seed) for seed in range(4000)], axis=0)
    assert means == pytest.approx([0.25] * 4, abs=0.03)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("answers", 0.95, 1.0), ("majority", 0.95, 1.0), ("shuffled", 0.2, 0.8)]
)
def test_a_policy_of_two_answers_learns_from_rewards_that_know_something(name, low, high):
    reward, rng = viva.rewards.find_reward(name), random.Random(0)
    logit = math.log(0.55 / 0.45)
    for step in range(300):
        right = 1 / (1 + math.exp(-logit))
        draws = [int(rng.random() < right) for _ in range(8)]
        group = solutions([said(draw) for draw in draws], answer="1", seed=step)
        for draw, advantage in zip(draws, group_advantages(reward.pay(group)), strict=True):
            logit += 0.1 * advantage * (draw - right)
    assert low <= 1 / (1 + math.exp(-logit)) <= high


def test_names_stand_for_rewards_and_shuffled_for_any_of_them():
    assert viva.rewards.find_reward("majority") == viva.rewards.majority()
    assert viva.rewards.find_reward("shuffled_tournament").of == viva.rewards.tournament()
    assert viva.rewards.find_reward("shuffled").of == viva.rewards.answers()
    assert viva.rewards.find_reward("shuffled").needs_answers
    assert not viva.rewards.find_reward("shuffled_majority").needs_answers
    with pytest.raises(ValueError, match=r"unknown reward 'majorty'.*Did you mean 'majority'"):
        viva.rewards.find_reward("majorty")
    with pytest.raises(ValueError, match="unknown reward 'turnament'"):
        viva.rewards.find_reward("shuffled_turnament")


def talk(reward, script, *, answer="2"):
    """A conversation of three agents and two rounds, every reply a solution."""
    builder = MultiAgentConversationEnvGroupBuilder(
        question="1 + 1?",
        renderer=RENDERER,
        protocol=Protocol(rounds=[Round("first", "Say it."), Round("last", "Say it again.")]),
        reward=reward,
        answer=answer,
        grader=is_correct,
        num_agents=3,
        seed=3,
    )
    policy = ScriptedPolicy(renderer=RENDERER, script=script)

    outcome = asyncio.run(run_group(builder, policy, max_retries=0))
    return builder, outcome.group


def changing(prompt, call):
    """The first round says 1, 1, 2 in some order, the second 2, 2, 1."""
    del prompt
    return said([1, 1, 2, 2, 2, 1][call])


def test_agents_are_paid_for_their_final_solutions():
    builder, group = talk(viva.rewards.majority(), changing)
    right = {int(agent): is_right for agent, is_right in builder.record()["correct"].items()}
    assert group.get_total_rewards() == [float(right[agent]) for agent in range(3)]
    assert sum(group.get_total_rewards()) == 2
    assert group.metrics_G[0]["majority/share"] == pytest.approx(2 / 3)
    assert group.metrics_G[0]["majority/correct"] == 1.0
    _, paid_by_first = talk(viva.rewards.majority(voters="first"), changing)
    assert [1 - reward for reward in group.get_total_rewards()] == paid_by_first.get_total_rewards()
    _, by_answer = talk(viva.rewards.answers(), changing)
    assert by_answer.get_total_rewards() == group.get_total_rewards()
    _, sure = talk(viva.rewards.log_probability(), changing, answer=None)
    assert sure.get_total_rewards() == [-1.0] * 3


def test_the_transcript_tells_what_was_paid_and_what_would_have_been():
    builder, group = talk(viva.rewards.shuffled("majority"), changing)
    plain, unshuffled = talk(viva.rewards.majority(), changing)
    record = builder.record()
    assert record["unshuffled"] == plain.record()["rewards"]
    assert list(record["rewards"].values()) == group.get_total_rewards()
    assert sorted(group.get_total_rewards()) == sorted(unshuffled.get_total_rewards())
    assert [own[f"agent_{agent}/reward"] for agent, own in enumerate(group.metrics_G)] == (
        group.get_total_rewards()
    )


def test_spans_are_shuffled_within_their_stream_and_round():
    spans = tuple(
        SpanCredit(
            seat=seat, transition=0, start=start, stop=start + 1, stream=stream, round_index=0, reward=r
        )
        for stream, start, values in (("r_sol", 0, [0.0, 1.0, 2.0]), ("r_meta", 1, [5.0, 6.0, 7.0]))
        for seat, r in enumerate(values)
    )
    credit = GroupCredit(spans=spans, weights={"r_sol": 1.0, "r_meta": 1.0})

    def rewards(found, stream):
        return [span.reward for span in found.spans if span.stream == stream]

    found = [shuffled_credit(credit, seed) for seed in range(200)]
    assert all(
        sorted(rewards(each, stream)) == rewards(credit, stream)
        for each in found
        for stream in credit.weights
    )
    assert len({tuple(rewards(each, "r_sol")) for each in found}) == 6
    places = [[(span.seat, span.start, span.stream) for span in each.spans] for each in (credit, found[0])]
    assert sorted(places[0]) == sorted(places[1])


def read_nothing(text, view):
    del text, view
    return Reading(response=Reply(), status=ReplyStatus.OK)


def test_a_conversation_without_final_solutions_is_refused():
    segment = Segment(name="say", instruction=lambda view: "Say it.", read=read_nothing)
    game = Protocol(rounds=[Round("only", [segment])])
    conversation = dry_runs(game, 2)[0].conversation
    with pytest.raises(
        ValueError, match=r"'majority' pays final solutions, which agents \[0, 1\] do not give"
    ):
        viva.rewards.majority().check_played(conversation)
    with pytest.raises(ValueError, match="num_agents must be at least 2"):
        viva.rewards.majority().check(game, 1)
