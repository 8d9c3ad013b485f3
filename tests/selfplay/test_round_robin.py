import asyncio
import json
import pickle
import random
from collections.abc import Mapping
from typing import Any

import pytest
from conversation_groups import round_robin_group
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.rl.rollouts import do_group_rollout, do_single_rollout
from tinker_cookbook.rl.types import Env

from viva.conversation.coordinator import ConversationVoidError
from viva.judging.comparison import VERDICT_PREFIX, NoValidComparisonsError, TournamentPattern
from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.testing import (
    Script,
    ScriptedPolicy,
    ScriptedReply,
    ScriptedSamplingClient,
    crashing,
    honest,
    injecting,
    malformed,
    silent,
    slow,
    tiny_renderer,
    turn_of,
)
from viva.training.rollouts import run_groups

RENDERER = tiny_renderer()
NAMES = {0: "10", 1: "30", 2: "20"}
"""Final solutions; the scripted judge prefers the larger number."""


def larger_wins(prompt: str) -> Mapping[str, float]:
    if not prompt.endswith(VERDICT_PREFIX):
        return {}
    first = prompt.split("Solution A:\n> ", 1)[1].split("\n", 1)[0]
    second = prompt.split("Solution B:\n> ", 1)[1].split("\n", 1)[0]
    if first == second:
        return {"T": 1.0}
    return {"A": 1.0} if first > second else {"B": 1.0}


def by_seat(prompt: str, call: int) -> ScriptedReply:
    agent_id, round_index = turn_of(prompt)
    return honest(NAMES[agent_id] if round_index else "0")


def builder_of(**options: Any) -> MultiAgentConversationEnvGroupBuilder:
    client = ScriptedSamplingClient(renderer=RENDERER, next_token=options.pop("next_token", larger_wins))
    judge = PolicySelfComparisonJudge(PolicyRef(sampling_client=client), RENDERER)
    return round_robin_group(
        **{"question": "2 + 2?", "renderer": RENDERER, "judge": judge, "max_rounds": 2, **options}
    )


async def play(envs: Any, policy: TokenCompleter) -> list[Any]:
    async def run(env: Any) -> Any:
        try:
            return await do_single_rollout(policy, env)
        except RuntimeError as error:
            await env.abort(str(error))
            return None

    return await asyncio.gather(*(run(env) for env in envs))


async def rewards_of(
    builder: MultiAgentConversationEnvGroupBuilder, script: Script = by_seat
) -> list[tuple[float, dict[str, float | int]]]:
    envs = await builder.make_envs()
    trajectories = await play(envs, ScriptedPolicy(renderer=RENDERER, script=script))
    return await builder.compute_group_rewards(trajectories, envs)


# rewards and metrics


async def test_the_cookbooks_own_rollouts_play_a_group() -> None:
    group = await do_group_rollout(builder_of(), ScriptedPolicy(renderer=RENDERER, script=by_seat))
    assert group.final_rewards_G == [-1.0, 1.0, 0.0]
    assert group.get_total_rewards() == [-1.0, 1.0, 0.0]
    assert [len(trajectory.transitions) for trajectory in group.trajectories_G] == [2, 2, 2]


async def test_the_metrics_are_the_specifications() -> None:
    builder = builder_of(answer="30", grader=lambda solution, answer: solution == answer)
    (_, first), (_, second), _ = await rewards_of(builder)
    assert first == {
        "episode_length": 6,
        "parsing_failures": 0,
        "win_minus_loss/mean": -1.0,
        "matchup_count": 4,
        "agent_0/reward": -1.0,
        "agent_0/win_rate": 0.0,
        "agent_0/correct": 0.0,
        "correct/first": 0.0,
        "correct/final": 0.0,
        "flip/wrong_to_right": 0.0,
        "reward_truth_gap": 0.0,
        "judge/identical_rate": 0.0,
        "judge/preference_A_rate": 0.5,
        "judge/preference_B_rate": 0.5,
        "judge/tie_rate": 0.0,
        "judge/invalid_rate": 0.0,
        "judge/confidence": 1.0,
        "judge/position_bias": 0.0,
        "judge/disagreement": 0.0,
        "judge/order_gap": 0.0,
        "judge/off_set_mass": 0.0,
        "judge/cyclic_triads": 0.0,
        "judge/accuracy": 1.0,
        "judge/pair_accuracy": 1.0,
    }
    assert (builder.record() or {})["correct_initial"] == dict.fromkeys("012", False)
    assert (second["agent_1/win_rate"], second["agent_1/correct"], second["correct/final"]) == (1.0, 1.0, 1.0)


async def test_one_way_tournaments_have_half_the_matchups() -> None:
    results = await rewards_of(builder_of(tournament_pattern=TournamentPattern.ALL_PAIRS_ONE_WAY))
    assert [reward for reward, _ in results] == [-1.0, 1.0, 0.0]
    assert [metrics["matchup_count"] for _, metrics in results] == [2, 2, 2]
    assert "judge/position_bias" not in results[0][1]


async def test_without_a_known_answer_nobody_is_called_right() -> None:
    for options in ({"answer": "30"}, {"grader": lambda solution, answer: True}):
        builder = builder_of(**options)
        (_, metrics), *_ = await rewards_of(builder)
        assert not [name for name in metrics if "correct" in name or "accuracy" in name]
        assert (builder.record() or {})["correct"] is None


async def test_identical_solutions_are_a_legal_case_even_before_a_judge_that_prefers_a_place() -> None:
    results = await rewards_of(
        builder_of(next_token=lambda prompt: {"A": 0.8, "B": 0.2}), lambda p, c: honest("same")
    )
    assert [reward for reward, _ in results] == pytest.approx([0.0, 0.0, 0.0])
    assert {name: value for name, value in results[0][1].items() if name.startswith("judge/")} == {
        "judge/identical_rate": 1.0
    }


async def test_replies_that_could_not_be_read_count_and_are_counted() -> None:
    def script(prompt: str, call: int) -> ScriptedReply:
        agent_id, round_index = turn_of(prompt)
        replies = {0: silent(), 1: malformed("x"), 2: ScriptedReply(text="99")}
        return honest("0") if round_index == 0 else replies[agent_id]

    results = await rewards_of(builder_of(), script)
    assert [metrics["parsing_failures"] for _, metrics in results] == [1, 1, 1]
    assert [reward for reward, _ in results] == [-1.0, 1.0, 0.0]  # '{"refl...' > "99" > ""


# Regression: rewards swapped between agents (DESIGN, trap 1)


@settings(max_examples=20)
@given(
    latencies=st.lists(st.integers(0, 8), min_size=6, max_size=6),
    seating=st.permutations(range(3)),
    order=st.sampled_from(["sequential", "simultaneous"]),
)
def test_rewards_follow_the_agent_whoever_is_fast_and_however_seats_are_listed(
    latencies: list[int], seating: list[int], order: str
) -> None:
    def script(prompt: str, call: int) -> ScriptedReply:
        agent_id, round_index = turn_of(prompt)
        return slow(by_seat(prompt, call), latencies[2 * agent_id + round_index])

    async def run() -> tuple[list[float], Any]:
        builder = builder_of(order=order)
        made = await builder.make_envs()
        envs: list[Env] = [made[agent_id] for agent_id in seating]
        trajectories = await play(envs, ScriptedPolicy(renderer=RENDERER, script=script))
        results = await builder.compute_group_rewards(trajectories, envs)
        return [reward for reward, _ in results], builder.record()

    rewards, record = asyncio.run(run())
    assert rewards == [{0: -1.0, 1: 1.0, 2: 0.0}[agent_id] for agent_id in seating]
    assert record["rewards"] == {"0": -1.0, "1": 1.0, "2": 0.0}
    assert [(turn["round_index"], turn["agent_id"]) for turn in record["turns"]] == [
        divmod(p, 3) for p in range(6)
    ]


# failures


def fails_at(*places: tuple[int, int]) -> Script:
    def script(prompt: str, call: int) -> ScriptedReply:
        return crashing("no memory") if turn_of(prompt) in places else by_seat(prompt, call)

    return script


async def test_a_failure_voids_the_conversation_by_default_and_ends_it_at_once() -> None:
    builder = builder_of()
    policy = ScriptedPolicy(renderer=RENDERER, script=fails_at((1, 0)))
    envs = await builder.make_envs()
    trajectories = await play(envs, policy)
    with pytest.raises(ConversationVoidError, match="agent 1 failed in round 1: no memory"):
        await builder.compute_group_rewards(trajectories, envs)
    assert len(policy.prompts) == 2
    record = builder.record() or {}
    assert (len(record["turns"]), record["rewards"], record["comparisons"]) == (1, {}, [])
    assert record["failures"] == [{"agent_id": 1, "round_index": 0, "reason": "no memory"}]
    json.dumps(record)


async def test_by_the_other_rule_those_who_are_left_are_compared() -> None:
    builder = builder_of(on_failure="continue")
    results = await rewards_of(builder, fails_at((1, 1)))
    assert [reward for reward, _ in results] == [-1.0, 0.0, 1.0]
    assert results[1][1] == {}
    assert results[0][1]["episode_length"] == 5
    assert results[0][1]["matchup_count"] == 2
    assert (builder.record() or {})["rewards"] == {"0": -1.0, "2": 1.0}


async def test_fewer_than_two_survivors_are_void_by_any_rule() -> None:
    with pytest.raises(
        ConversationVoidError, match=r"agent 0 failed in round 1.*; agent 2 failed in round 1"
    ):
        await rewards_of(builder_of(on_failure="continue"), fails_at((0, 0), (2, 0)))


@pytest.mark.parametrize("on_failure", ["void", "continue"])
async def test_a_seat_that_stopped_without_a_word_voids_the_conversation(on_failure: str) -> None:
    builder = builder_of(on_failure=on_failure)
    envs = await builder.make_envs()
    await envs[0].initial_observation()
    with pytest.raises(ConversationVoidError, match=r"agents \[0, 1, 2\] stopped before their last turn"):
        await builder.compute_group_rewards([], envs)


async def test_a_judge_that_says_nothing_readable_gives_no_reward() -> None:
    builder = builder_of(next_token=lambda prompt: {"x": 1.0})
    with pytest.raises(NoValidComparisonsError, match=r"agents \[0, 1, 2\]"):
        await rewards_of(builder)
    assert [c["outcome"] for c in (builder.record() or {})["comparisons"]] == ["invalid"] * 6


async def test_environments_of_two_conversations_are_refused() -> None:
    builder = builder_of()
    one, other = await builder.make_envs(), await builder.make_envs()
    for mixed in ([*one[:2], other[2]], [*one, *other], [one[0], one[0]]):
        with pytest.raises(ValueError, match="the environments of one make_envs call"):
            await builder.compute_group_rewards([], mixed)


# Regression: one agent is retried into a different conversation (DESIGN, trap 18)


async def test_every_attempt_is_a_new_conversation() -> None:
    builder = builder_of()
    first = await builder.make_envs()
    await play(first, ScriptedPolicy(renderer=RENDERER, script=fails_at((0, 0))))
    assert [reward for reward, _ in await rewards_of(builder)] == [-1.0, 1.0, 0.0]
    assert (builder.record() or {})["failures"] == []


# what is kept and what is refused


async def test_the_record_tells_the_whole_conversation_in_json() -> None:
    builder = builder_of(answer="30", grader=lambda solution, answer: solution == answer)
    assert builder.record() is None
    await rewards_of(builder)
    record = json.loads(json.dumps(builder.record()))
    assert set(record) == {
        "system_prompt",
        "judge",
        *("question", "answer", "protocol", "num_agents", "max_rounds", "order", "turns", "failures"),
        *("comparisons", "rewards", "correct", "correct_initial"),
    }
    assert (record["protocol"], record["order"]) == ("round_robin", "sequential")
    assert record["correct"] == {"0": False, "1": True, "2": False}
    assert record["rewards"] == {"0": -1.0, "1": 1.0, "2": 0.0}
    turn = record["turns"][4]
    assert (turn["agent_id"], turn["round_index"], turn["status"]) == (1, 1, "ok")
    assert turn["response"]["solution"] == "30"
    assert json.loads(turn["text"])["solution"] == "30"
    assert turn["prompt"].startswith("Problem:\n> 2 + 2?\n")
    comparison = record["comparisons"][0]
    assert (comparison["first"], comparison["second"], comparison["outcome"], comparison["score"]) == (
        0,
        1,
        "B",
        1.0,
    )


async def test_personas_and_tags_are_passed_on() -> None:
    builder = builder_of(personas={0: "the Owl.", 1: "the Fox.", 2: "the Hen."}, tags=("debate", "test"))
    policy = ScriptedPolicy(renderer=RENDERER, script=by_seat)
    await play(await builder.make_envs(), policy)
    assert "You are agent 1, the Fox. This is round 1 of 2." in policy.prompts[1]
    assert builder.logging_tags() == ["debate", "test"]
    assert builder_of().logging_tags() == ["round_robin"]


def test_a_builder_can_be_sent_to_another_process() -> None:
    builder = builder_of()
    builder.judge.policy.sampling_client = None
    again = pickle.loads(pickle.dumps(builder))
    assert again.question == builder.question
    again.judge.policy.sampling_client = ScriptedSamplingClient(renderer=RENDERER, next_token=larger_wins)
    assert [reward for reward, _ in asyncio.run(rewards_of(again))] == [-1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_agents": 1}, "num_agents must be at least 2"),
        ({"max_rounds": 0}, "max_rounds=0"),
        ({"order": "free"}, "'free'"),
        ({"on_failure": "ignore"}, "'void' or 'continue'; got 'ignore'"),
        ({"personas": {1: "x"}}, r"ids 0, 1, 2, \.\.\. without gaps"),
    ],
)
def test_a_conversation_that_cannot_be_held_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        builder_of(**options)


# a storm of faults


class Storm:
    """Agents of which some crash, hang until cancelled, or talk nonsense, by a seed."""

    def __init__(self, latency_seed: int) -> None:
        self.latency_seed = latency_seed

    def seat(self, *, group: int, attempt: int, seat: int) -> TokenCompleter:
        fate = random.Random(f"{group}/{attempt}/{seat}")
        speed = random.Random(f"{self.latency_seed}/{group}/{attempt}/{seat}")

        def script(prompt: str, call: int) -> ScriptedReply:
            draw = fate.random()
            if draw < 0.05:
                return crashing(f"{group}/{seat}")
            if draw < 0.1:
                raise asyncio.CancelledError
            reply = (
                malformed("1")
                if draw < 0.2
                else injecting("2", victim=0)
                if draw < 0.3
                else honest(f"{draw:.3f}")
            )
            return slow(reply, speed.randrange(6))

        return ScriptedPolicy(renderer=RENDERER, script=script)


@pytest.mark.parametrize("on_failure", ["void", "continue"])
def test_in_a_storm_of_faults_every_conversation_ends_and_speed_changes_nothing(on_failure: str) -> None:
    def run(latency_seed: int) -> list[Any]:
        async def storm() -> list[Any]:
            builders = [builder_of(on_failure=on_failure, max_rounds=1, seed=place) for place in range(40)]
            outcomes = await run_groups(builders, Storm(latency_seed))
            assert asyncio.all_tasks() == {asyncio.current_task()}
            return [
                (
                    outcome.void_reason,
                    outcome.group and (outcome.group.final_rewards_G, outcome.group.trajectories_G),
                    outcome.failures,
                    builder.record(),
                )
                for outcome, builder in zip(outcomes, builders, strict=True)
            ]

        return asyncio.run(storm())

    results = run(0)
    assert sum(group is not None for _, group, _, _ in results) > 20
    for void_reason, group, failures, record in results:
        assert (void_reason is None) == (group is not None)
        assert group is not None or failures
        assert record is not None
    assert run(1) == results


async def test_the_record_has_every_prompt_as_it_was_sent() -> None:
    builder = builder_of()
    policy = ScriptedPolicy(renderer=RENDERER, script=by_seat)
    envs = await builder.make_envs()
    await play(envs, policy)
    await builder.compute_group_rewards([], envs)
    record = builder.record()
    assert record is not None
    for turn in record["turns"]:
        assert any(record["system_prompt"] in sent and turn["prompt"] in sent for sent in policy.prompts)
    client = builder.judge.policy.current()
    judge = record["judge"]
    asked = [each for each in record["comparisons"] if each["was_asked"]]
    assert len(asked) == len(client.prompts) > 0
    for each in asked:
        assert any(
            judge["system_prompt"] in sent and each["prompt"] in sent and sent.endswith(judge["prefill"])
            for sent in client.prompts
        )
