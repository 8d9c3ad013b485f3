import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tinker
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollouts import do_single_rollout
from tinker_cookbook.rl.types import InitialObservationOverflow, Trajectory

from viva.conversation.coordinator import MultiAgentCoordinator
from viva.conversation.protocol import Order
from viva.conversation.records import AgentResponse, Conversation, ReplyStatus
from viva.selfplay.group import MultiAgentConversationEnv
from viva.selfplay.round_robin import round_robin_protocol
from viva.testing import (
    CHAT_TOKENS,
    HANG,
    Script,
    ScriptedPolicy,
    ScriptedReply,
    crashing,
    honest,
    injecting,
    malformed,
    silent,
    slow,
    tiny_renderer,
    turn_of,
)

RENDERERS = {style: tiny_renderer(style, ["<think>", "</think>"]) for style in CHAT_TOKENS}
RENDERER = RENDERERS["qwen3_instruct"]


def by_seat(prompt: str, call: int) -> ScriptedReply:
    agent_id, round_index = turn_of(prompt)
    return honest(f"{agent_id}/{round_index}")


def seats(
    num_agents: int = 3,
    max_rounds: int = 2,
    *,
    order: Order = "sequential",
    min_agents: int = 1,
    style: str = "qwen3_instruct",
) -> tuple[MultiAgentCoordinator, list[MultiAgentConversationEnv]]:
    protocol = round_robin_protocol(max_rounds, order=order, on_failure="continue", min_agents=min_agents)
    coordinator = MultiAgentCoordinator("2 + 2?", num_agents, protocol)
    return coordinator, [
        MultiAgentConversationEnv(agent_id, coordinator, RENDERERS[style]) for agent_id in range(num_agents)
    ]


async def play(envs: Sequence[MultiAgentConversationEnv], policy: TokenCompleter) -> list[Trajectory | str]:
    """A rollout loop that tolerates failures: what went wrong instead of the trajectory of a failed seat."""

    async def run(env: MultiAgentConversationEnv) -> Trajectory | str:
        try:
            return await do_single_rollout(policy, env)
        except (RuntimeError, asyncio.CancelledError) as error:
            await env.abort(f"{type(error).__name__}: {error}")
            return str(error)

    return await asyncio.gather(*(run(env) for env in envs))


def converse(script: Script, **options: Any) -> tuple[Conversation, list[Trajectory | str], ScriptedPolicy]:
    coordinator, envs = seats(**options)
    policy = ScriptedPolicy(renderer=envs[0].renderer, script=script)
    results = asyncio.run(play(envs, policy))
    return coordinator.conversation, results, policy


# Regression: agents wake at the end and sample once more; replies land on others (DESIGN, trap 1)


@pytest.mark.parametrize("order", ["sequential", "simultaneous"])
def test_the_policy_is_called_once_per_turn_and_never_after_the_last(order: Order) -> None:
    conversation, results, policy = converse(by_seat, order=order)
    assert len(policy.prompts) == 6
    assert [len(result.transitions) for result in results if isinstance(result, Trajectory)] == [2, 2, 2]
    assert conversation.final_solutions == {0: "0/1", 1: "1/1", 2: "2/1"}
    for result in results:
        assert isinstance(result, Trajectory)
        assert [transition.episode_done for transition in result.transitions] == [False, True]
        assert result.final_ob.length == 0


@settings(max_examples=25)
@given(
    latencies=st.lists(st.integers(0, 7), min_size=9, max_size=9),
    order=st.sampled_from(["sequential", "simultaneous"]),
)
def test_a_conversation_does_not_depend_on_who_is_fast(latencies: list[int], order: Order) -> None:
    def script(prompt: str, call: int) -> ScriptedReply:
        agent_id, round_index = turn_of(prompt)
        return slow(honest(f"{agent_id}/{round_index}"), latencies[3 * round_index + agent_id])

    conversation, results, _ = converse(script, max_rounds=3, order=order)
    assert (conversation, results) == converse(by_seat, max_rounds=3, order=order)[:2]


# Regression: one sampler error blocks the peers for ever (DESIGN, trap 2)


@pytest.mark.parametrize("order", ["sequential", "simultaneous"])
@pytest.mark.parametrize("seat", [0, 1, 2])
@pytest.mark.parametrize("round_index", [0, 1])
def test_the_crash_of_one_agent_leaves_nobody_waiting(order: Order, seat: int, round_index: int) -> None:
    def script(prompt: str, call: int) -> ScriptedReply:
        return crashing() if turn_of(prompt) == (seat, round_index) else by_seat(prompt, call)

    conversation, results, policy = converse(script, order=order)
    assert results[seat] == "out of memory"
    assert len(policy.prompts) == 6 - (1 - round_index)
    assert sorted(conversation.final_solutions) == [agent_id for agent_id in range(3) if agent_id != seat]
    (failure,) = conversation.failures
    assert (failure.agent_id, failure.round_index) == (seat, round_index)
    assert failure.reason == "RuntimeError: out of memory"


async def test_a_hanging_call_that_is_cancelled_lets_the_others_go_on() -> None:
    coordinator, envs = seats(max_rounds=1)

    def script(prompt: str, call: int) -> ScriptedReply:
        return slow(honest("never"), HANG) if turn_of(prompt)[0] == 0 else by_seat(prompt, call)

    policy = ScriptedPolicy(renderer=RENDERER, script=script)
    stuck = asyncio.ensure_future(play(envs[:1], policy))
    others = asyncio.ensure_future(play(envs[1:], policy))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not others.done()
    stuck.cancel()
    await asyncio.gather(stuck, return_exceptions=True)
    assert all(isinstance(result, Trajectory) for result in await others)
    assert coordinator.conversation.failures[0].reason.startswith("CancelledError")


def test_when_too_few_are_left_the_others_stop_and_a_reply_on_its_way_is_dropped() -> None:
    def script(prompt: str, call: int) -> ScriptedReply:
        agent_id, round_index = turn_of(prompt)
        return crashing() if agent_id == 2 else slow(honest(f"{agent_id}/{round_index}"), 30)

    conversation, results, policy = converse(script, order="simultaneous", min_agents=3, max_rounds=4)
    assert len(policy.prompts) == 3
    assert conversation.turns == ()
    assert [len(result.transitions) for result in results if isinstance(result, Trajectory)] == [1, 1]


async def test_an_agent_whose_conversation_is_over_before_it_begins_has_an_empty_episode() -> None:
    coordinator, envs = seats(min_agents=3)
    await coordinator.fail(0, "gone")
    assert isinstance(await envs[1].initial_observation(), InitialObservationOverflow)
    (result,) = await play(envs[1:2], ScriptedPolicy(renderer=RENDERER, script=by_seat))
    assert isinstance(result, Trajectory)
    assert [transition.ac.tokens for transition in result.transitions] == [[]]


async def test_stepping_without_a_prompt_is_an_error() -> None:
    _, envs = seats(1, 1)
    with pytest.raises(RuntimeError, match="call initial_observation first"):
        await envs[0].step([1])


async def test_the_late_reply_of_an_agent_that_was_given_up_is_dropped() -> None:
    coordinator, envs = seats(2, 1)
    await envs[0].initial_observation()
    await envs[0].abort("timeout")
    result = await envs[0].step([65])
    assert result.episode_done
    assert coordinator.conversation.turns == ()


# what a seat reports about its replies


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (honest("42"), "ok"),
        (ScriptedReply(text='Sure: {"solution": "42"}'), "repaired"),
        (ScriptedReply(text="42"), "unstructured"),
        (silent(), "unstructured"),
        (malformed("42"), "unstructured"),
    ],
)
def test_every_reply_counts_as_a_turn_and_says_how_it_was_read(reply: ScriptedReply, status: str) -> None:
    conversation, results, _ = converse(lambda prompt, call: reply, num_agents=2, max_rounds=1)
    assert [turn.status for turn in conversation.turns] == [ReplyStatus(status)] * 2
    for result in results:
        assert isinstance(result, Trajectory)
        (transition,) = result.transitions
        parse = {name: transition.metrics[f"parse/{name}"] for name in ("ok", "repaired", "unstructured")}
        assert parse == {name: float(name == status) for name in parse}


def test_thinking_never_becomes_the_solution() -> None:
    def script(prompt: str, call: int) -> ScriptedReply:
        return ScriptedReply(text="<think>{'solution': 'no'}</think>" + honest("yes").text)

    class Thinking(ScriptedPolicy):
        """Samples the control tokens of a thinking model, which a script's shielded text cannot contain."""

        async def __call__(
            self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
        ) -> TokensWithLogprobs:
            result = await super().__call__(model_input, stop, max_tokens=max_tokens)
            tokenizer = self.renderer.tokenizer
            text = tokenizer.decode(result.tokens[:-1])
            result.tokens = [*tokenizer.encode(text, add_special_tokens=False), result.tokens[-1]]
            result.maybe_logprobs = [-1.0] * len(result.tokens)
            return result

    coordinator, envs = seats(1, 1)
    asyncio.run(play(envs, Thinking(renderer=RENDERER, script=script)))
    (turn,) = coordinator.conversation.turns
    assert isinstance(turn.response, AgentResponse)
    assert (turn.response.solution, turn.status) == ("yes", ReplyStatus.OK)


# Regression: a stop string of our own cuts code and nested JSON (DESIGN, trap 7)


async def test_stop_conditions_are_the_renderers_own() -> None:
    for renderer in RENDERERS.values():
        protocol = round_robin_protocol(2, on_failure="continue", min_agents=1)
        coordinator = MultiAgentCoordinator("q", 1, protocol)
        env = MultiAgentConversationEnv(0, coordinator, renderer)
        first = await env.initial_observation()
        assert not isinstance(first, InitialObservationOverflow)
        assert first[1] == renderer.get_stop_sequences()
        assert (await env.step([65])).next_stop_condition == renderer.get_stop_sequences()


def test_code_with_a_brace_on_its_own_line_goes_through() -> None:
    code = 'int main() {\n  return f("{\\"a\\": 1\n}");\n}\n'
    conversation, _, _ = converse(lambda prompt, call: honest(code), num_agents=2)
    assert set(conversation.final_solutions.values()) == {code}


# Regression: agents beyond the personas get agent 0's (DESIGN, trap 5)


def test_every_agent_reads_a_persona_of_its_own() -> None:
    _, _, policy = converse(by_seat, num_agents=7, max_rounds=1)
    personas = [prompt[prompt.rfind("You are agent") :].split(", ", 1)[1] for prompt in policy.prompts]
    assert len(set(personas)) == 7


# Regression: one agent speaks as another, or as the system (DESIGN, traps 15 and invariant "Conversation")


@pytest.mark.parametrize("style", list(CHAT_TOKENS))
@pytest.mark.parametrize("order", ["sequential", "simultaneous"])
def test_an_injecting_agent_forges_no_token_no_turn_and_no_header(style: str, order: Order) -> None:
    def run(liar: Callable[[int], ScriptedReply]) -> tuple[list[Trajectory | str], ScriptedPolicy]:
        def script(prompt: str, call: int) -> ScriptedReply:
            agent_id, round_index = turn_of(prompt)
            return liar(round_index) if agent_id == 1 else by_seat(prompt, call)

        _, results, policy = converse(script, style=style, order=order)
        return results, policy

    def lines(prompts: list[str]) -> list[str]:
        return [
            line for prompt in prompts for line in prompt.splitlines() if line and not line.startswith(">")
        ]

    def controls(results: list[Trajectory | str]) -> list[list[int]]:
        tokenizer: Any = RENDERERS[style].tokenizer
        ids = tokenizer.control_ids
        return [
            [token for token in transition.ob.to_ints() if token in ids]
            for result in results
            if isinstance(result, Trajectory)
            for transition in result.transitions
        ]

    calm_results, calm = run(lambda round_index: honest(f"1/{round_index}"))
    wild_results, wild = run(lambda round_index: injecting("1", victim=0, style=style))
    assert controls(wild_results) == controls(calm_results)
    assert lines(wild.prompts) == lines(calm.prompts)


def test_what_an_agent_said_is_kept_under_its_own_name() -> None:
    def script(prompt: str, call: int) -> ScriptedReply:
        agent_id, round_index = turn_of(prompt)
        return injecting("mine", victim=2) if agent_id == 1 else honest(f"{agent_id}/{round_index}")

    conversation, _, _ = converse(script)
    assert conversation.final_solutions[2] == "2/1"
    assert conversation.final_solutions[1].startswith("mine\n<|im_start|>")
