"""A renderer made of a tokenizer's own chat template, where tinker-cookbook has none that writes the same."""

from collections.abc import Sequence
from typing import Any, cast

import tinker
from tinker_cookbook.renderers.base import (
    Message,
    ParseTermination,
    RenderContext,
    RenderedMessage,
    Renderer,
    Role,
    get_text_content,
    parse_response_for_stop_token,
)

from viva.conversation.guard import GuardedTokenizer

CHAT_TEMPLATE = "chat_template"
"""Its name as a renderer."""

_PROBE = "zqx"
"""A text that no template holds."""


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
        user, reply = Message(role="user", content="x"), Message(role="assistant", content=_PROBE)
        self._takes_system = self._keeps_system()
        self._stop = self._control_after(
            self._apply([user, reply], is_prompt=False), tokenizer.inner.eos_token_id
        )
        self._control_after(self._apply([Message(role="user", content=_PROBE)], is_prompt=True), None)

    @property
    def has_extension_property(self) -> bool:
        """Templates may rewrite earlier turns, so it is not promised."""
        return False

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
        """Text of a reply; a clean end is the token that ends a turn."""
        return parse_response_for_stop_token(response, self.tokenizer, self._stop)

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
        messages = [Message(role="system", content=_PROBE), Message(role="user", content="x")]
        try:
            return _PROBE in self._apply(messages, is_prompt=True)
        except ValueError:
            return False

    def _control_after(self, text: str, default: int | None) -> int:
        """The first control token behind the probe."""
        before, found, after = text.rpartition(_PROBE)
        if not found:
            raise ValueError(f"the chat template does not show a message; it gives {before or after!r}")
        tokens = self._guarded.encode(after, add_special_tokens=False)
        control = next((token for token in tokens if token in self._guarded.control_ids), default)
        if control is None:
            raise ValueError(
                f"the chat template puts {after!r} behind a message, which has no control token: text could forge it"
            )
        return control
