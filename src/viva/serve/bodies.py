"""Bodies of requests as OpenAI's interface names their fields, and what is wrong with one that is not understood."""

import json
from typing import Annotated, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from viva.conversation.messages import did_you_mean

MOST_CHOICES = 128
"""Samples of one request, all prompts together."""
_MOST_STOPS = 16
_MOST_ALTERNATIVES = 20
_LONGEST_SHOWN = 60

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Fields of OpenAI's interface that are not supported, by the values that ask for nothing; so does ``null``."""


class RequestError(ValueError):
    """A request that is refused.

    Attributes:
        status: Of the answer.
        param: The field that is to blame, if one is.
        code: Machine-readable reason, if there is one.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class TextPart(_Body):
    """Text as a part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool = False
    """Whether a last chunk counts the tokens."""


class _SamplingBody(_Body):
    model: str
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """Not in OpenAI's interface: the number of most likely tokens that are kept; -1 or 0 keeps all."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=_MOST_STOPS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Ignored."""
    return_token_ids: bool = False
    """Not in OpenAI's interface: whether the answer has ``prompt_token_ids`` and ``token_ids``, as vLLM names them."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=_MOST_ALTERNATIVES)
    """Not in OpenAI's interface: alternatives to every token of the prompt, which is then scored."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a sample."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(_SamplingBody):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=_MOST_ALTERNATIVES)

    @property
    def token_limit(self) -> int | None:
        """Most tokens of a sample; ``None``: to the end of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(_SamplingBody):
    """Body of ``/v1/completions``."""

    prompt: (
        str
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=MOST_CHOICES)]
    )
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=_MOST_ALTERNATIVES)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [each for each in self.prompt if not isinstance(each, int)]


class RewardBody(_Body):
    """The reward that an agent gives its episode."""

    reward: float


_NAMES = frozenset(
    name
    for body in (ChatBody, CompletionBody, ChatMessage, TextPart, StreamOptions)
    for name in body.model_fields
)
"""Names of all fields; the library's places also hold the kinds that it tried."""

JsonObject = dict[str, object]
"""A JSON object, of a request or of an answer."""

BodyT = TypeVar("BodyT", bound=_SamplingBody)


def read_json(raw: bytes) -> JsonObject:
    """The JSON object in a body.

    Raises:
        RequestError: If there is none.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body must be a JSON object; it cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object; got {_shown(value)}")
    return value


def parse_body(body_class: type[BodyT], raw: bytes) -> BodyT:
    """A request's body.

    Raises:
        RequestError: If it is not understood, or asks for what is not supported.
    """
    given = {name: value for name, value in read_json(raw).items() if value is not None}
    known = body_class.model_fields
    for name in sorted(given.keys() - known.keys()):
        if name not in _NEUTRAL:
            raise RequestError(
                f"unknown field {_shown(name)}; allowed: {', '.join(sorted(known))}.{did_you_mean(name, list(known))}",
                param=name[:_LONGEST_SHOWN],
                code="unknown_parameter",
            )
        if not any(given[name] == value for value in _NEUTRAL[name]):
            allowed = " or ".join(json.dumps(value) for value in _NEUTRAL[name])
            raise RequestError(
                f"{name} is not supported here; leave it out (or give {allowed}); got {_shown(given[name])}",
                param=name,
                code="unsupported_parameter",
            )
        del given[name]
    # clients send their own answers back with empty fields
    if isinstance(messages := given.get("messages"), list):
        given["messages"] = [_without_nulls(message) for message in cast(list[object], messages)]
    try:
        body = body_class.model_validate(given)
    except ValidationError as error:
        raise _mistake(error) from error
    _check_together(body)
    return body


def _without_nulls(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {name: each for name, each in value.items() if each is not None and each != []}


def _check_together(body: _SamplingBody) -> None:
    """Refuse fields that contradict each other.

    Raises:
        RequestError: If some do.
    """
    if "" in body.stops:
        raise RequestError("stop holds an empty string, which would end every sample at once", param="stop")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream=true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs are not streamed; leave stream out", param="prompt_logprobs")
    if isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise RequestError(
                "give max_completion_tokens or max_tokens, not both; they mean the same", param="max_tokens"
            )
    if isinstance(body, CompletionBody) and (num := body.n * len(body.prompts)) > MOST_CHOICES:
        raise RequestError(
            f"n={body.n} samples of {len(body.prompts)} prompts are {num}; a request may ask for {MOST_CHOICES}. Send "
            "several requests",
            param="n",
        )


def _mistake(error: ValidationError) -> RequestError:
    """The mistake that lies deepest, in words: of a value of several kinds, others are about the wrong kind."""
    first = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
    is_extra = first["type"] == "extra_forbidden"
    known = [part for part in first["loc"][:-1] if isinstance(part, int) or part in _NAMES]
    last = [part for part in first["loc"][-1:] if is_extra or isinstance(part, int) or part in _NAMES]
    place = ".".join(str(part) for part in (*known, *last))
    if first["type"] == "missing":
        return RequestError(f"{place} is missing", param=place, code="missing_required_parameter")
    if is_extra:
        return RequestError(
            f"{place} is not supported here; leave it out", param=place, code="unsupported_parameter"
        )
    what = first["msg"][0].lower() + first["msg"][1:]
    return RequestError(f"{place}: {what}; got {_shown(first['input'])}", param=place, code="invalid_value")


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
