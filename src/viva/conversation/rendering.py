"""Messages to prompt tokens and sampled tokens to text, for every model family; text stays text.

`load_renderer` picks a renderer for a model and puts a `GuardedTokenizer` under it; `build_prompt` and `read_reply` are
the only ways to a prompt and to a reply. Code of others that asks such a renderer itself gets the same.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import tinker
from tinker_cookbook import model_info, renderers
from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.renderers.base import (
    ContentPart,
    Message,
    ParseTermination,
    RenderContext,
    RenderedMessage,
    Renderer,
    Role,
    get_text_content,
    parse_response_for_stop_token,
)
from tinker_cookbook.renderers.role_colon import RoleColonRenderer

from viva.conversation.guard import MARKER, GuardedTokenizer
from viva.conversation.messages import did_you_mean

CHAT_TEMPLATE = "chat_template"
"""The name of `ChatTemplateRenderer` among renderers."""
_SENTINEL = "zqx"
"""A text that no template holds."""
_FAMILIES = (
    (("<|im_start|>", "<|im_end|>"), "qwen3_instruct"),
    (("<|start_header_id|>", "<|eot_id|>"), "llama3"),
)
"""Control tokens that give a chat format away, for models that the cookbook does not list."""
_FALLBACK = "role_colon"
_NAMES = (
    *("role_colon", "llama3", "qwen3", "qwen3_disable_thinking", "qwen3_instruct", "qwen3_5"),
    *("qwen3_5_disable_thinking", "deepseekv3", "deepseekv3_thinking", "gpt_oss_no_sysprompt"),
    *("gpt_oss_low_reasoning", "gpt_oss_medium_reasoning", "gpt_oss_high_reasoning", "kimi_k2", "nemotron3"),
)
"""Frequent renderer names, to suggest one for a misspelled name; the cookbook knows more."""

_ROLES = ("system", "user", "assistant")
_ROLE_WORD = re.compile("[a-z_]+")
"""Other roles that environments of others use, where a role is not told by text alone."""
_FORGED_ROLE = re.compile(
    r"([\n\r\v\f\x1c-\x1e\x85\u2028\u2029])(?=(?:system|user|assistant|tool)\s*:)", re.I
)
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_SPACE = re.compile(r"\s*+")
_MOST_BLOCKS = 16
"""The renderers rescan the reply for every block of thoughts that is never closed, and for every message of the
Harmony format; a reply with more of them than this is read without the renderer."""
_MESSAGE = "<|message|>"
_PROBE = [Message(role="user", content="x")]
_TALKS = (
    _PROBE,
    [Message(role="system", content="Be brief."), *_PROBE],
    [*_PROBE, Message(role="assistant", content="y"), *_PROBE],
)
"""Conversations on which a family's renderer is compared with the tokenizer's template."""
_TOOL_MARKS = ("<tool_call>", "<|tool_call", "<\uff5ctool\u2581call", "\uff5cDSML\uff5c", "to=functions.")
"""Openings of tool calls. `viva.conversation.tools` reads calls off the text, so such a reply is read without the
renderer, whose patterns for calls backtrack and whose readers fail (numbers of many digits, deep nesting)."""


def load_renderer(tokenizer: Any, *, model_name: str, renderer_name: str | None = None) -> Renderer:
    """The renderer for a model's chat format, with a guarded tokenizer under it; it can be pickled.

    Args:
        tokenizer: The model's Hugging Face tokenizer (or an already guarded one).
        model_name: Hub name or local path.
        renderer_name: A tinker-cookbook renderer, or ``chat_template`` for the tokenizer's own template. By default
            the one that the cookbook recommends for the model, else the one that fits the tokenizer's control
            tokens and writes what its template writes, else the tokenizer's template, else ``role_colon``, which
            needs no control tokens.

    Raises:
        ValueError: If there is no renderer of that name, or it needs control tokens that the tokenizer lacks.
    """
    guarded = tokenizer if isinstance(tokenizer, GuardedTokenizer) else GuardedTokenizer(tokenizer)
    name = renderer_name or _recommended(model_name) or _fitting(guarded)
    try:
        renderer = _make(name, guarded, model_name)
    except TypeError as error:  # it brings a tokenizer of its own, which no guard can be put around
        raise ValueError(
            f"renderer {name!r} does not fit the tokenizer of {model_name!r}: {error} "
            f"Pass renderer_name={_fitting(guarded)!r}."
        ) from error
    except RendererError as error:
        known = [CHAT_TEMPLATE, *_NAMES, *renderers.get_registered_renderer_names()]
        hint = did_you_mean(name, known) or f" Frequent ones are {', '.join(_NAMES)}."
        raise ValueError(
            f"renderer_name must name a tinker-cookbook renderer; got {name!r}.{hint}"
        ) from error
    _check_control_tokens(renderer, guarded, name, model_name)
    opening = str(guarded.decode(renderer.build_generation_prompt(_PROBE).to_ints()))
    renderer.__class__ = _guarded_class(type(renderer))
    cast(_Guarded, renderer).opens_thoughts = opening.rstrip().endswith(_THINK_OPEN)
    return renderer


def _make(name: str, tokenizer: GuardedTokenizer, model_name: str) -> Renderer:
    if name != CHAT_TEMPLATE:
        return renderers.get_renderer(name, cast(Any, tokenizer), model_name=model_name)
    renderer: Any = ChatTemplateRenderer(tokenizer)
    renderer._renderer_name, renderer._model_name = name, model_name
    return renderer


def _recommended(model_name: str) -> str | None:
    try:
        return model_info.get_recommended_renderer_name(model_name)
    except (ConfigurationError, KeyError, ValueError):
        return None


def _fitting(tokenizer: GuardedTokenizer) -> str:
    """The renderer that writes what the tokenizer's chat template writes: its family's if that does, else the template.

    A template that writes the day's date gives no prompts that can be repeated: there the family's is taken.
    """
    added: dict[str, int] = tokenizer.get_added_vocab()
    family = next((name for needed, name in _FAMILIES if all(token in added for token in needed)), None)
    try:
        by_template = ChatTemplateRenderer(tokenizer)
    except ValueError:  # no template, or one whose markers text could forge
        return family or _FALLBACK
    if family is None:
        return CHAT_TEMPLATE
    by_family = renderers.get_renderer(family, cast(Any, tokenizer))
    agree = by_template.writes_the_date or all(_agree(by_family, by_template, talk) for talk in _TALKS)
    return family if agree else CHAT_TEMPLATE


def _agree(one: Renderer, other: Renderer, messages: list[Message]) -> bool:
    try:
        expected = other.build_generation_prompt(messages).to_ints()
    except ValueError:  # such messages are not for this template
        return True
    return one.build_generation_prompt(messages).to_ints() == expected


def _check_control_tokens(
    renderer: Renderer, tokenizer: GuardedTokenizer, name: str, model_name: str
) -> None:
    """A chat format whose markers are plain text for this tokenizer would let text forge them."""
    try:
        stops = renderer.get_stop_sequences()
        tokens = renderer.build_generation_prompt(_PROBE).to_ints()
    except (AssertionError, ValueError) as error:
        missing = str(error)
    else:
        text_only = isinstance(renderer, RoleColonRenderer)
        if text_only or tokenizer.control_ids.intersection(tokens).difference(stops):
            return
        missing = "its role markers are not control tokens"
    fitting = _fitting(tokenizer)
    raise ValueError(
        f"renderer {name!r} does not fit the tokenizer of {model_name!r}: {missing}. "
        f"Pass renderer_name={(_FALLBACK if fitting == name else fitting)!r}."
    )


def _restore(tokenizer: GuardedTokenizer, name: str, model_name: str) -> Renderer:
    return load_renderer(tokenizer, model_name=model_name, renderer_name=name)


class _Guarded(Renderer):
    """Our ways to write and to read, for code of others that asks a renderer itself.

    And a renderer pickles as its name, and comes back on a plain tokenizer; ours must come back guarded.
    """

    opens_thoughts = False
    """Whether the prompt ends with the opening of thoughts, so that replies begin inside them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.tokenizer, self._renderer_name, self._model_name)

    def build_generation_prompt(
        self, messages: list[Message], role: Role = "assistant", prefill: str | None = None
    ) -> tinker.ModelInput:
        """The renderer's own prompt of shielded messages, in one chunk."""
        prompt = super().build_generation_prompt(shield_messages(self, messages), role, prefill)
        return _in_one_chunk(prompt)

    def parse_response(self, response: list[int]) -> tuple[Message, ParseTermination]:
        """A reply as the renderer's own reader parses it, if that takes linear time; else the text before its stop."""
        response = with_own_end(self, response)
        ended = response[-1:] and response[-1] in self.get_stop_sequences()
        # what the readers decode, too: it is decoded once
        if _is_plain(str(cast(Any, self.tokenizer).decode(response[:-1] if ended else response))):
            try:
                return cast(Any, super()).parse_response(response)
            except RendererError:
                pass  # more than one end-of-turn token: not from a sampler that stops at the first
        text, ended = _before_stop(self, response)
        if not ended:
            return Message(role="assistant", content=text), ParseTermination.MALFORMED
        return Message(role="assistant", content=_finished(self, text)), ParseTermination.STOP_SEQUENCE


@cache
def _guarded_class(renderer_class: type[Renderer]) -> type[_Guarded]:
    members = {"__module__": renderer_class.__module__, "__doc__": renderer_class.__doc__}
    return type(renderer_class.__name__, (_Guarded, renderer_class), members)


def _in_one_chunk(prompt: tinker.ModelInput) -> tinker.ModelInput:
    """A tenth of the objects of one chunk for every part of a message. The renderer's own chunks were validated."""
    tokens: list[int] = []
    for chunk in prompt.chunks:
        tokens += cast(tinker.EncodedTextChunk, chunk).tokens
    return tinker.ModelInput.model_construct(chunks=[tinker.EncodedTextChunk.model_construct(tokens=tokens)])


def direct_messages(question: str, system_prompt: str | None = None) -> list[Message]:
    """The messages that ask the bare question, without any conversation."""
    return [*system_messages(system_prompt), {"role": "user", "content": question}]


def system_messages(*texts: str | None) -> list[Message]:
    """One system message of the texts that are given, or none."""
    given = [text for text in texts if text is not None]
    return [{"role": "system", "content": "\n\n".join(given)}] if given else []


def build_prompt(
    renderer: Renderer, messages: Sequence[Message], prefill: str | None = None
) -> tinker.ModelInput:
    """Prompt tokens for the assistant's next message, which is made to begin with a prefill of ours.

    Whatever stands in the messages, their number of control tokens is the chat format's own.

    Raises:
        ValueError: If the renderer is unguarded or a message has fields that cannot be shielded.
    """
    if prefill and isinstance(renderer, RoleColonRenderer):
        prefill = (
            f" {prefill}"  # its messages begin with a space, which its generation prompt leaves to the model
        )
    if not isinstance(renderer, _Guarded):
        messages = shield_messages(renderer, messages)
    return renderer.build_generation_prompt(list(messages), prefill=prefill)


def reply_tokens(renderer: Renderer, text: str) -> list[int]:
    """Tokens of a reply as it stands behind `build_prompt`, without the end of the turn; none is a control token.

    Raises:
        ValueError: If the renderer is unguarded.
    """
    tokenizer = _require_guard(renderer)
    begun = f" {text}" if isinstance(renderer, RoleColonRenderer) else text
    return tokenizer.encode(tokenizer.shield(begun), add_special_tokens=False)


def shield_messages(renderer: Renderer, messages: Sequence[Message]) -> list[Message]:
    """The messages with shielded contents, see `build_prompt`."""
    tokenizer = _require_guard(renderer)
    text_roles = isinstance(renderer, RoleColonRenderer)

    def shield(text: str) -> str:
        # what the shield drops must not hide a role from the look for forged ones
        return tokenizer.shield(_FORGED_ROLE.sub(r"\1> ", text.replace(MARKER, "")) if text_roles else text)

    for role in (message["role"] for message in messages):
        if role not in _ROLES and (text_roles or not _ROLE_WORD.fullmatch(role)):
            also = "" if text_roles else ", or another word of lower-case letters"
            raise ValueError(f"a message must have a role of {', '.join(_ROLES)}{also}; got {role!r}")
    return [_shielded(message, shield) for message in messages]


def _require_guard(renderer: Renderer) -> GuardedTokenizer:
    tokenizer: Any = renderer.tokenizer
    if not isinstance(tokenizer, GuardedTokenizer):
        raise ValueError(
            f"{type(renderer).__name__} has an unguarded tokenizer: text could become control tokens. "
            "Make renderers with viva.conversation.rendering.load_renderer."
        )
    return tokenizer


def _shielded(message: Message, shield: Any) -> Message:
    fields = sorted(set(message) - {"role", "content"})
    if fields:
        raise ValueError(
            f"a message must have a role and a content, nothing else; got also {', '.join(fields)}. Write what else "
            "it should say into its content."
        )
    content = message["content"]
    if isinstance(content, str):
        return Message(role=message["role"], content=shield(content))
    parts: list[ContentPart] = []
    for part in content:
        if part["type"] != "text":
            raise ValueError(f"a message must consist of text; got a part of type {part['type']!r}")
        parts.append({"type": "text", "text": shield(part["text"])})
    return Message(role=message["role"], content=parts)


def read_reply(renderer: Renderer, tokens: list[int]) -> tuple[str, bool]:
    """Text of a sampled reply without end-of-turn token and thinking.

    Linear in the reply's length; never raises for what a model wrote.

    Returns:
        The text, and whether the reply was ended by the model (``False``: cut at the token limit).
    """
    message, termination = renderer.parse_response(list(tokens))
    text = get_text_content(message)
    return (text, True) if termination.is_clean else (_without_leading_thoughts(renderer, text), False)


def with_own_end(renderer: Renderer, tokens: list[int]) -> list[int]:
    """A reply's tokens, with the tokenizer's end of text for another one: a model's generation config may name more.

    Only ``role_colon`` has no token of its own that ends a turn.
    """
    tokenizer: Any = renderer.tokenizer
    if not isinstance(renderer, RoleColonRenderer) or not isinstance(tokenizer, GuardedTokenizer):
        return tokens
    is_control = bool(tokens) and tokens[-1] in tokenizer.control_ids
    if (
        not is_control
        or tokenizer.eos_token_id is None
        or not tokenizer.added_tokens_decoder[tokens[-1]].special
    ):
        return tokens
    return [*tokens[:-1], tokenizer.eos_token_id]


def _is_plain(text: str) -> bool:
    blocks = text.count(
        _THINK_OPEN, text.rfind(_THINK_CLOSE) + 1
    )  # opened after the last one that was closed
    if max(blocks, text.count(_MESSAGE)) > _MOST_BLOCKS:
        return False
    return not any(mark in text for mark in _TOOL_MARKS)


def _before_stop(renderer: Renderer, tokens: list[int]) -> tuple[str, bool]:
    """Text before the first stop, and whether that is the reply's end."""
    stops: list[str | int] = [*renderer.get_stop_sequences()]
    if isinstance(renderer, RoleColonRenderer):  # replies end at the end of text, too
        stops.append(cast(Any, renderer.tokenizer).eos_token_id)
    end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
    text = str(cast(Any, renderer.tokenizer).decode(tokens[:end]))
    cuts = [(place, stop) for stop in stops if isinstance(stop, str) and (place := text.find(stop)) >= 0]
    if cuts:
        place, stop = min(cuts)
        return text[:place], place + len(stop) == len(text)
    return text, end == len(tokens) - 1


def _finished(renderer: Renderer, text: str) -> str:
    """The text of a reply that the model ended, without thinking; thinking that is never closed is what it says."""
    return _without_leading_thoughts(renderer, text) if _THINK_CLOSE in text else text


def _without_leading_thoughts(renderer: Renderer, text: str) -> str:
    """The text behind the thinking that a reply begins with; empty if the thinking itself was cut."""
    start = 0
    opens_thoughts = isinstance(renderer, _Guarded) and renderer.opens_thoughts
    if opens_thoughts and not text.lstrip().startswith(_THINK_OPEN):
        text = _THINK_OPEN + text
    while True:
        space = _SPACE.match(text, start)
        place = space.end() if space else start
        if not text.startswith(_THINK_OPEN, place):
            return text[start:]
        close = text.find(_THINK_CLOSE, place)
        if close < 0:
            return ""
        start = close + len(_THINK_CLOSE)


class ChatTemplateRenderer(Renderer):
    """Prompts are what ``apply_chat_template`` makes of the messages; the end of a turn is found in the template.

    A system message that the template refuses or leaves out is put before the first user message.

    Raises:
        ValueError: If there is no template, it cannot be used, or no control token stands between a message and the
            reply, so that text could forge the next turn.
    """

    def __init__(self, tokenizer: GuardedTokenizer) -> None:
        super().__init__(cast(Any, tokenizer))
        self._guarded = tokenizer
        if not getattr(tokenizer.inner, "chat_template", None):
            raise ValueError("the tokenizer has no chat template; use another renderer_name")
        user, reply = Message(role="user", content="x"), Message(role="assistant", content=_SENTINEL)
        self._takes_system = self._keeps_system()
        self._stop = self._control_after(
            self._apply([user, reply], is_prompt=False), tokenizer.inner.eos_token_id
        )
        self._control_after(self._apply([Message(role="user", content=_SENTINEL)], is_prompt=True), None)

    @property
    def writes_the_date(self) -> bool:
        """Whether the template asks for the day's date, so that prompts of tomorrow may be others."""
        return "strftime_now" in str(self._guarded.inner.chat_template)

    def get_stop_sequences(self) -> list[int]:
        """The control token that ends the assistant's turn."""
        return [self._stop]

    def build_generation_prompt(
        self, messages: Sequence[Message], role: Role = "assistant", prefill: str | None = None
    ) -> tinker.ModelInput:
        """The template's text, tokenized, for the assistant's next message.

        Raises:
            ValueError: If the template refuses the messages, or another role is to speak.
        """
        if role != "assistant":
            raise ValueError(f"a chat template prompts the assistant only; got role {role!r}")
        text = self._apply(messages, is_prompt=True) + (prefill or "")
        return tinker.ModelInput.from_ints(self._guarded.encode(text, add_special_tokens=False))

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Not possible: a template renders whole conversations.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "a chat template renders whole conversations, not single messages. For supervised examples use one of "
            "tinker-cookbook's renderers."
        )

    def parse_response(self, response: list[int]) -> tuple[Message, ParseTermination]:
        """Text of a reply; a clean end is the token that ends a turn, after which thinking is left out."""
        message, termination = parse_response_for_stop_token(response, self.tokenizer, self._stop)
        if termination.is_clean:
            message["content"] = _finished(self, get_text_content(message))
        return message, termination

    def _apply(self, messages: Sequence[Message], *, is_prompt: bool) -> str:
        from jinja2.exceptions import TemplateError

        plain = [{"role": message["role"], "content": get_text_content(message)} for message in messages]
        if len(plain) > 1 and plain[0]["role"] == "system" and not self._takes_system:
            first, second, *rest = plain
            plain = [second | {"content": f"{first['content']}\n\n{second['content']}"}, *rest]
        inner: Any = self._guarded.inner
        try:
            return str(inner.apply_chat_template(plain, tokenize=False, add_generation_prompt=is_prompt))
        except (TemplateError, TypeError, ArithmeticError, LookupError, RecursionError) as error:
            roles = ", ".join(message["role"] for message in plain)
            raise ValueError(f"the chat template refuses messages with the roles {roles}: {error}") from error

    def _keeps_system(self) -> bool:
        self._takes_system = True
        messages = [Message(role="system", content=_SENTINEL), Message(role="user", content="x")]
        try:
            return _SENTINEL in self._apply(messages, is_prompt=True)
        except ValueError:
            return False

    def _control_after(self, text: str, default: int | None) -> int:
        """The first control token behind the probe."""
        before, found, after = text.rpartition(_SENTINEL)
        if not found:
            raise ValueError(f"the chat template does not show a message; it gives {before or after!r}")
        tokens = self._guarded.encode(after, add_special_tokens=False)
        control = next((token for token in tokens if token in self._guarded.control_ids), default)
        if control is None:
            raise ValueError(
                f"the chat template puts {after!r} behind a message, which has no control token: text could forge it"
            )
        return control
