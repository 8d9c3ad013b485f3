"""A user's function as the reward: what it is shown, how its numbers are credited, and what is refused."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import viva
from viva import Protocol, Round, Segment
from viva.conversation.protocol import Reading, View, read_solution
from viva.conversation.records import Reply, ReplyStatus, Solution
from viva.conversation.roles import assign
from viva.experts.strategy import iid
from viva.judging.answers import is_correct
from viva.judging.records import ConversationRecord
from viva.rewards import find_reward
from viva.selfplay.critique import critique_protocol
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.testing import ScriptedPolicy, tiny_renderer
from viva.training.batch import plain_batch
from viva.training.members import member_metrics
from viva.training.metrics import rollout_metrics
from viva.training.rollouts import GroupOutcome, run_group
from viva.training.samples import batch_samples

RENDERER = tiny_renderer()


async def played(
    reward: Any, answer: str | None = None, **argued: Any
) -> tuple[GroupOutcome, MultiAgentConversationEnvGroupBuilder]:
    protocol = Protocol(
        rounds=[
            Round(
                "argue",
                Segment(name="argue", instruction="Make your point.", **argued),
                ["argue"],
                "sequential",
            ),
            Round("final", "Conclude.", ["argue"]),
        ]
    )
    builder = MultiAgentConversationEnvGroupBuilder(
        question="Tea or coffee?",
        renderer=RENDERER,
        protocol=protocol,
        reward=find_reward(reward),
        num_agents=2,
        answer=answer,
    )
    policy = ScriptedPolicy(renderer=RENDERER, script=lambda prompt, call: f"Tea, {call} times.")
    return await run_group(builder, policy, max_retries=0), builder


async def test_a_reward_by_agent_is_what_the_agents_earn():
    shown: list[viva.Conversation] = []

    def second_wins(conversation: viva.Conversation) -> dict[int, float]:
        shown.append(conversation)
        return {0: -1.0, 1: 1.0}

    outcome, builder = await played(second_wins, answer="tea")
    assert builder.record()["rewards"] == {"0": -1.0, "1": 1.0}
    assert outcome.group is not None
    assert outcome.group.final_rewards_G == [-1.0, 1.0]
    assert (shown[0].question, shown[0].answer, len(shown[0].turns)) == ("Tea or coffee?", "tea", 4)
    assert builder.reward.name == "second_wins"


def length_pays(conversation: viva.Conversation) -> dict[int, float]:
    assert conversation.answer == "tea"
    return {agent: float(len(text)) for agent, text in conversation.final_solutions.items()}


def last_word_pays(conversation: viva.Conversation) -> dict[str, dict[int, float]]:
    return {"argue": {0: 2.0, 1: float(len(conversation.turns))}}


@pytest.mark.parametrize("reward", [length_pays, last_word_pays])
async def test_a_stored_conversation_is_paid_as_the_one_that_was_held(reward: Any) -> None:
    _, builder = await played(reward, answer="tea")
    record = ConversationRecord.model_validate(builder.record())
    assert await find_reward(reward).stored_pay(record, 0) == record.rewards


async def test_the_function_sees_the_answer_without_the_problem_that_it_is_known_of() -> None:
    answer = "tea [reasoning_gym:chain_sum,seed=7,size=200#12:9f3a01bc]"
    outcome, builder = await played(length_pays, answer=answer)
    assert outcome.group is not None
    record = ConversationRecord.model_validate(builder.record())
    assert record.answer == answer
    assert await find_reward(length_pays).stored_pay(record, 0) == record.rewards


async def test_an_error_of_the_function_is_no_damage_of_the_file(tmp_path: Path) -> None:
    def lookup_fails(conversation: viva.Conversation) -> dict[int, float]:
        return {0: {}["missing"], 1: 0.0}

    _, builder = await played(length_pays, answer="tea")
    record = ConversationRecord.model_validate(builder.record())
    with pytest.raises(ValueError, match=r"KeyError: 'missing', in the reward 'lookup_fails', .* line \d+"):
        await find_reward(lookup_fails).stored_pay(record, 0)


async def test_a_reward_by_segment_goes_to_the_tokens_of_that_segment_alone():
    async def final_pays(conversation: viva.Conversation) -> dict[str, dict[int, float]]:
        return {"final": {0: 2.0, 1: 3.0}}

    _, builder = await played(final_pays)
    assert builder.record()["streams"] == {"0": {"final": 2.0}, "1": {"final": 3.0}}
    assert builder.record()["rewards"] == {"0": 2.0, "1": 3.0}
    credit = builder.credit()
    assert credit is not None
    assert sorted((span.round_index, span.reward) for span in credit.spans) == [(1, 2.0), (1, 3.0)]


async def test_the_rewards_of_an_agents_segments_are_summed():
    _, builder = await played(lambda conversation: {"argue": {0: 0.5}, "final": {0: 2.0, 1: 3.0}})
    assert builder.record()["rewards"] == {"0": 2.5, "1": 3.0}


async def test_numbers_of_numpy_are_numbers():
    _, builder = await played(lambda conversation: {0: np.float32(0.5), 1: np.int64(3)})
    assert builder.record()["rewards"] == {"0": 0.5, "1": 3.0}
    outcome, _ = await played(lambda conversation: {0: np.bool_(True), 1: 0.0})
    assert "got np.True_ for agent 0" in str(outcome.void_reason)


def first_agents_solve(text: str, view: View) -> Reading:
    solves = view.agent_id < view.num_agents - 1
    return read_solution(text, view) if solves else Reading(response=Reply(), status=ReplyStatus.OK)


@pytest.mark.parametrize("num_agents", [1, 2, 3])
async def test_an_agent_without_a_solution_is_paid_and_left_out_of_the_truth(num_agents: int):
    segment = Segment(name="say", instruction=lambda view: "Say it.", read=first_agents_solve)
    builder = MultiAgentConversationEnvGroupBuilder(
        question="1 + 1?",
        renderer=RENDERER,
        protocol=Protocol(rounds=[Round("only", [segment])]),
        reward=find_reward(lambda conversation: {agent: float(agent) for agent in conversation.finished}),
        num_agents=num_agents,
        answer="2",
        grader=is_correct,
    )
    policy = ScriptedPolicy(renderer=RENDERER, script=lambda prompt, call: "23"[call % 2])
    group = (await run_group(builder, policy, max_retries=0)).group
    assert group is not None
    assert group.get_total_rewards() == [float(agent) for agent in range(num_agents)]
    told = [{"correct/final", "reward_truth_gap"} & set(own) for own in group.metrics_G]
    solver = {"correct/final", "reward_truth_gap"} if num_agents == 3 else {"correct/final"}
    assert told == [solver] * (num_agents - 1) + [solver - {"correct/final"}]


def last_agents_reply_is_unreadable(text: str, view: View) -> Reading:
    status = ReplyStatus.UNSTRUCTURED if view.agent_id == view.num_agents - 1 else ReplyStatus.OK
    return Reading(response=Solution(solution=text), status=status)


@pytest.mark.parametrize("wrap", [lambda builder: builder, iid])
async def test_an_agent_that_left_is_neither_paid_nor_trained_nor_part_of_the_baseline(wrap: Any):
    segment = Segment(
        name="say",
        instruction=lambda view: "Say it.",
        read=last_agents_reply_is_unreadable,
        on_invalid="fail",
    )
    builder = MultiAgentConversationEnvGroupBuilder(
        question="1 + 1?",
        renderer=RENDERER,
        protocol=Protocol(rounds=[Round("only", [segment])], on_failure="continue"),
        reward=find_reward(lambda conversation: {0: 1.0, 1: 2.0, 2: 9.0}),
        num_agents=3,
    )
    policy = ScriptedPolicy(renderer=RENDERER, script=lambda prompt, call: "2")
    outcome = await run_group(wrap(builder), policy, max_retries=0)
    assert outcome.paid_rewards() == [1.0, 2.0, None]
    advantages = [set(sample.advantages_T.tolist()) for sample in plain_batch([outcome]).samples_N]
    assert advantages == [{-0.5}, {0.5}, set()]
    assert [sample.seat for sample in batch_samples([outcome])] == [0, 1]


async def test_a_reward_of_agents_counts_once_where_each_has_two_seats():
    protocol = critique_protocol(2, comparisons=False)
    builder = MultiAgentConversationEnvGroupBuilder(
        question="1 + 1?",
        renderer=RENDERER,
        protocol=protocol,
        roles=assign("per_agent", protocol, 2),
        reward=find_reward(lambda conversation: {0: 1.0, 1: 2.0}),
        num_agents=2,
    )
    outcome = await run_group(builder, ScriptedPolicy(renderer=RENDERER, script=lambda prompt, call: "2"))
    assert outcome.paid_rewards() == [1.0, None, 2.0, None]
    assert rollout_metrics([outcome])["reward/mean"] == 1.5
    told = member_metrics([outcome])
    assert (told["agent_0/reward"], told["agent_1/reward"]) == (1.0, 2.0)
    credit = builder.credit()
    assert credit is not None
    assert {span.seat: span.reward for span in credit.spans} == {0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0}


class Opinion(Reply):
    evaluation: str


async def test_a_reply_of_an_own_kind_is_no_solution_when_it_is_read_back():
    segment = Segment(
        name="note",
        instruction=lambda view: "Note.",
        read=lambda text, view: Reading(response=Opinion(evaluation=text), status=ReplyStatus.OK),
    )
    builder = MultiAgentConversationEnvGroupBuilder(
        question="1 + 1?",
        renderer=RENDERER,
        protocol=Protocol(rounds=[Round("solve", "Solve."), Round("note", [segment])]),
        reward=find_reward("majority"),
        num_agents=2,
    )
    await run_group(builder, ScriptedPolicy(renderer=RENDERER, script=lambda prompt, call: "2"))
    record = ConversationRecord.model_validate(builder.record())
    assert record.conversation().final_solutions == {0: "2", 1: "2"}
    assert await builder.reward.stored_pay(record, 0) == record.rewards == {0: 1.0, 1: 1.0}


async def test_what_the_function_raises_says_where():
    read = await played(lambda conversation: json.loads("{"))
    assert f"in the reward '<lambda>', {Path(__file__).name} line " in str(read[0].void_reason)
    outcome, _ = await played(lambda conversation: {0: 1 / 0})
    line = inspect.currentframe().f_lineno - 1
    told = f"ZeroDivisionError: division by zero; in the reward '<lambda>', {Path(__file__).name} line {line}"
    assert told in str(outcome.void_reason)


@pytest.mark.parametrize(
    ("pay", "told"),
    [
        ({}, r"must return rewards by agent id, or by segment and agent id; got \{\}"),
        ([1.0, 0.0], r"got \[1.0, 0.0\]"),
        (None, "got None"),
        ({0: 1.0}, r"nothing for agents \[1\]; agents that finished: \[0, 1\]"),
        ({0: 1.0, 1: 2.0, 2: 0.0}, r"unknown agents \[2\]"),
        ({0: float("nan"), 1: 0.0}, r"as finite numbers \(.*\); got nan for agent 0"),
        ({0: True, 1: 0.0}, r"of a truth value, float\(...\)\); got True for agent 0"),
        ({"fin": {0: 1.0}}, "segment 'fin', allowed: argue, final"),
        ({"final": 3}, "got 3 for segment 'final'"),
        ({"final": {7: 1.0}}, r"unknown agents \[7\]"),
    ],
)
async def test_what_is_no_reward_becomes_no_number(pay: Any, told: str):
    outcome, _ = await played(lambda conversation: pay)
    assert outcome.group is None
    assert re.search(told, str(outcome.void_reason))


async def test_a_segment_that_earns_nothing_is_not_paid():
    outcome, _ = await played(lambda conversation: {"argue": {0: 1.0}, "final": {1: 1.0}}, stream=None)
    assert "segment 'argue' earns nothing (stream=None): give it a stream, or no pay" in str(
        outcome.void_reason
    )
    paid, _ = await played(lambda conversation: {"final": {0: 1.0, 1: 0.0}}, stream=None)
    assert paid.void_reason is None
