import asyncio
import json
import math
from typing import Any

import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from viva.conversation.protocol import View, persona
from viva.conversation.rendering import build_prompt
from viva.conversation.replies import parse_reply
from viva.selfplay.round_robin import round_robin_protocol
from viva.testing import (
    CHAT_TOKENS,
    HANG,
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
    tiny_tokenizer,
    turn_of,
)

TOKENIZERS = {style: tiny_tokenizer(style, ["<think>"]) for style in CHAT_TOKENS}
RENDERER = tiny_renderer()


def prompt_tokens(text: str = "hello") -> tinker.ModelInput:
    return build_prompt(RENDERER, [{"role": "user", "content": text}])


@given(style=st.sampled_from(sorted(CHAT_TOKENS)), text=st.text(max_size=30))
def test_the_tiny_tokenizer_spells_every_text_exactly(style: str, text: str) -> None:
    tokenizer = TOKENIZERS[style]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("style", sorted(CHAT_TOKENS))
def test_control_tokens_are_single_ids(style: str) -> None:
    for token in ("<|end|>", "<think>", *CHAT_TOKENS[style]):
        assert len(TOKENIZERS[style].encode(token, add_special_tokens=False)) == 1


@pytest.mark.parametrize(("agent_id", "round_index"), [(0, 0), (11, 3)])
def test_a_script_can_tell_whose_turn_it_is(agent_id: int, round_index: int) -> None:
    question = "You are agent 5, x. This is round 9 of 9.\nYou are agent 6, y. This is round 8 of 9."
    protocol = round_robin_protocol(7)
    view = View(
        agent_id=agent_id, num_agents=12, round_index=round_index, aliases=(), persona=persona(agent_id)
    )
    messages = protocol.messages(protocol.prompt(question, (), view))
    for style in CHAT_TOKENS:
        renderer = tiny_renderer(style)
        shown = renderer.tokenizer.decode(build_prompt(renderer, messages).to_ints())
        assert turn_of(str(shown)) == (agent_id, round_index)
    with pytest.raises(ValueError, match="not a prompt of a conversation turn"):
        turn_of("hello")


def test_the_agents_say_what_their_names_promise() -> None:
    assert parse_reply(honest("x").text).strategy == "json"
    assert parse_reply(silent().text).response.solution == ""
    assert parse_reply(malformed("x").text).strategy == "text"
    assert not malformed("x").ended
    assert slow(honest("x"), 3).latency == 3
    assert slow(honest("x")).latency == HANG
    with pytest.raises(RuntimeError, match="too hot"):
        crashing("too hot")
    for style, control in CHAT_TOKENS.items():
        assert all(token in injecting("x", victim=1, style=style).text for token in control)
    assert json.loads(injecting("x", victim=1).text)["solution"].startswith("x\n")


async def test_a_policy_decodes_asks_and_encodes() -> None:
    asked: list[tuple[str, int]] = []

    def script(prompt: str, call: int) -> ScriptedReply | str:
        asked.append((prompt, call))
        return "short" if call else ScriptedReply(text="cut", ended=False)

    policy = ScriptedPolicy(renderer=RENDERER, script=script)
    stops = RENDERER.get_stop_sequences()
    cut, short = await policy(prompt_tokens(), stops), await policy(prompt_tokens("again"), stops)
    assert [call for _, call in asked] == [0, 1]
    assert "again" in asked[1][0]
    assert policy.prompts == [prompt for prompt, _ in asked]
    assert (cut.stop_reason, short.stop_reason) == ("length", "stop")
    assert len(short.tokens) == len("short") + 1 == len(short.logprobs)
    limited = await policy(prompt_tokens(), stops, max_tokens=3)
    assert (len(limited.tokens), limited.stop_reason) == (3, "length")


async def test_a_reply_of_control_tokens_is_spelled_as_text() -> None:
    policy = ScriptedPolicy(
        renderer=RENDERER, script=lambda prompt, call: ScriptedReply(text="<|im_end|>", ended=False)
    )
    reply = await policy(prompt_tokens(), [])
    assert len(reply.tokens) == len("<|im_end|>")


async def test_a_hanging_policy_hangs_until_it_is_cancelled() -> None:
    policy = ScriptedPolicy(renderer=RENDERER, script=lambda prompt, call: slow(honest("x")))
    call = asyncio.ensure_future(policy(prompt_tokens(), []))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not call.done()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_client_samples_scores_and_counts() -> None:
    client = ScriptedSamplingClient(
        renderer=RENDERER,
        script=lambda prompt, call: f"{call}",
        next_token=lambda prompt: {"a": 0.6, "b": 0.3} if prompt.endswith("assistant\n") else {},
    )
    params = tinker.SamplingParams(max_tokens=8, seed=7)
    first, second = await asyncio.gather(
        client.sample(prompt_tokens(), 2, params),
        client.sample(prompt_tokens(), 1, params, True, 2, 3),
    )
    assert client.max_in_flight == 2
    assert client.in_flight == 0
    assert client.seeds == [7, 7]
    assert len(first.sequences) == 2
    assert [len(sequence.tokens) for sequence in first.sequences] == [2, 2]
    (sequence,) = second.sequences
    ids = [RENDERER.tokenizer.encode(letter)[0] for letter in "ab"]
    if hasattr(sequence, "topk_logprobs"):  # older SDKs have no place for them
        assert dict(sequence.topk_logprobs[0]) == pytest.approx(
            {ids[0]: math.log(0.6), ids[1]: math.log(0.3)}
        )
        assert sequence.topk_logprobs[1] is None
    rows: Any = second.topk_prompt_logprobs
    assert len(rows) == prompt_tokens().length
    assert all(row is None for row in rows)


async def test_a_failing_script_fails_its_call_only() -> None:
    client = ScriptedSamplingClient(
        renderer=RENDERER, script=lambda prompt, call: crashing() if "bad" in prompt else "fine"
    )
    params = tinker.SamplingParams(max_tokens=8)
    bad, good = (
        client.sample(prompt_tokens("bad"), 1, params),
        client.sample(prompt_tokens("good"), 1, params),
    )
    assert (await good).sequences[0].stop_reason == "stop"
    with pytest.raises(RuntimeError, match="out of memory"):
        await bad
    assert client.in_flight == 0
