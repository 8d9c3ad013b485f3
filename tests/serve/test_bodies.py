"""What a request may say, and how a mistake is told."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.serve.bodies import ChatBody, CompletionBody, RequestError, parse_body

HELLO = [{"role": "user", "content": "hello"}]
CHAT = {"model": "m", "messages": HELLO}
TEXT = {"model": "m", "prompt": "hello"}


def chat(**changes: Any) -> ChatBody:
    return parse_body(ChatBody, json.dumps(CHAT | changes).encode())


def completion(**changes: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps(TEXT | changes).encode())


@pytest.mark.parametrize(
    ("changes", "complaint", "param"),
    [
        (
            {"temprature": 1},
            "unknown field \"temprature\"; allowed: .*Did you mean 'temperature'",
            "temprature",
        ),
        ({"frequency_penalty": 0.5}, r"not supported here; leave it out \(or give 0\); got 0.5", None),
        ({"tools": [{"type": "function"}]}, r"tools is not supported here", "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported", None),
        ({"n": 0}, "n: input should be greater than or equal to 1; got 0", "n"),
        ({"n": True}, "n: .*integer; got true", "n"),
        ({"n": 1000}, "less than or equal to 128", "n"),
        ({"temperature": float("nan")}, "finite number", "temperature"),
        ({"temperature": -1}, "greater than or equal to 0; got -1", "temperature"),
        ({"top_p": 0}, "top_p: input should be greater than 0; got 0", "top_p"),
        ({"max_tokens": 0}, "greater than or equal to 1", "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "not both", "max_tokens"),
        ({"seed": 2**63}, "less than 9223372036854775808", "seed"),
        ({"stop": ""}, "empty string", "stop"),
        ({"top_logprobs": 2}, "needs logprobs=true", "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "needs stream=true", "stream_options"),
        ({"stream": True, "prompt_logprobs": 0}, "are not streamed", "prompt_logprobs"),
        ({"messages": []}, "messages: .*at least 1 item", "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "'developer', 'user' or 'assistant'", None),
        ({"messages": [{"role": "user"}]}, "messages.0.content is missing", "messages.0.content"),
        ({"messages": [HELLO[0] | {"name": "Ann"}]}, "messages.0.name is not supported here", None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type: .*'text'", None),
        ({"messages": "hello"}, 'messages: .*list; got "hello"', "messages"),
    ],
)
def test_a_mistake_is_told_with_the_field_and_what_is_allowed(
    changes: dict[str, Any], complaint: str, param: str | None
) -> None:
    with pytest.raises(RequestError, match=complaint) as raised:
        chat(**changes)
    assert raised.value.status == 400
    assert param is None or raised.value.param == param


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"])
def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError, match="must be a JSON object"):
        parse_body(ChatBody, raw)


def test_more_samples_than_a_request_may_have_are_refused() -> None:
    with pytest.raises(RequestError, match="n=64 samples of 3 prompts are 192; a request may ask for 128"):
        completion(prompt=["a", "b", "c"], n=64)


def test_fields_that_ask_for_nothing_are_taken() -> None:
    body = chat(
        presence_penalty=0, tools=[], tool_choice="none", response_format={"type": "text"}, logit_bias=None
    )
    assert body == chat()


def test_an_answer_of_the_server_can_be_sent_back_as_a_message() -> None:
    answer = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "annotations": []}
    assert [each.text for each in chat(messages=[*HELLO, answer]).messages] == ["hello", "hi"]


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].text == "ab"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_a_prompt_is_text_or_tokens_one_or_many(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from([*ChatBody.model_fields, "tools", "x"]), JSON)
def test_any_value_of_a_field_is_taken_or_refused_in_words(name: str, value: Any) -> None:
    with contextlib.suppress(RequestError):
        chat(**{name: value})
