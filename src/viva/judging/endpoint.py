"""A judge behind an OpenAI-compatible endpoint: hosted, or served on this machine.

`ChatEndpoint` sends chat completions: a bounded number at a time, with a time-out, again after a pause where the server
is busy (429, 5xx, or unreachable), within a budget of requests, tokens and money; an answer that was kept is not asked
for again. The key comes from an environment variable and stands in a header only. A request that fails raises
`EndpointError`, so that no score is made up. `viva.judging.endpoint_judge` compares solutions through it.
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import json
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import httpx
from tinker_cookbook.renderers.base import Message

from viva.conversation.records import encodable
from viva.judging.comparison import JudgeError
from viva.judging.usage import count_tokens

DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
"""The environment variable with the key, for https addresses."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_BUSY = frozenset({408, 409, 425, 429})
"""Statuses below 500 that are worth another attempt."""
_REFUSED = frozenset({401, 402, 403, 404})
"""Statuses that every further request would get, too."""
_LONGEST_WAIT_S = 120.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_LARGEST_ANSWER = 8 * 2**20
"""Bytes."""
_LONGEST_REASON = 300
_THOUGHT_END = "</think>"


class EndpointError(JudgeError):
    """A request that failed for good; the message says why, without the key."""


class EndpointStoppedError(EndpointError):
    """Every further request would fail, too: the budget is spent, or the endpoint refuses the key or the model."""


class KeptAnswers(Protocol):
    """Answers by the digest of what was asked, kept from one evaluation or run to the next."""

    def get(self, key: str) -> dict[str, Any] | None:
        """The answer that was kept, if there is one."""
        ...

    def put(self, key: str, answer: Mapping[str, object]) -> None:
        """Keep an answer."""
        ...


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """Options of a model behind an endpoint: its address, and bounds."""

    url: str
    """Base address, like ``https://host/v1`` or ``http://127.0.0.1:8000/v1``."""
    model: str
    key_variable: str | None = None
    """Environment variable with the key; by default OPENAI_API_KEY for https addresses, and no key for http."""
    concurrency: int = 8
    """Requests at a time."""
    timeout_s: float = 60.0
    """Longest time of one request."""
    retries: int = 5
    """Further attempts where the server is busy or cannot be reached."""
    max_requests: int | None = None
    """Budget of requests, attempts included; ``None``: no limit."""
    max_total_tokens: int | None = None
    """Budget of tokens, prompts included. Requests under way when it is reached still count."""
    max_price: float | None = None
    """Budget in the currency of the prices. Requests under way when it is reached still count."""
    prices: tuple[float, float] | None = None
    """Prices of a million prompt tokens and of a million sampled ones."""
    body: Mapping[str, object] = field(default_factory=dict[str, object])
    """Fields laid over each request; ``None`` takes one away."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is none
            parts, is_address = urlsplit(""), False
        if not is_address or parts.query or parts.fragment:
            raise ValueError(
                f"a judge's address must be like https://host/v1 or http://127.0.0.1:8000/v1; got {self.url!r}"
            )
        if parts.username is not None or parts.password is not None:
            raise ValueError(
                "a judge's address must not hold a user name or key; put the key into an environment variable, "
                f"{DEFAULT_KEY_VARIABLE} or the one that judge_key_variable names"
            )
        if not self.model.strip():
            raise ValueError(f"a judge behind {self.url} needs the model's name there: judge_model=NAME")
        if self.concurrency < 1 or self.retries < 0 or not self.timeout_s > 0:
            raise ValueError(
                "an endpoint needs a concurrency of 1 or more, retries of 0 or more and a positive time-out; got "
                f"{self.concurrency}, {self.retries} and {self.timeout_s}"
            )
        for name, value in (("requests", self.max_requests), ("tokens", self.max_total_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"a judge's budget of {name} must be 1 or more, or left out; got {value}")
        self._check_prices()

    def _check_prices(self) -> None:
        if self.prices is not None and (
            len(self.prices) != 2 or not all(0 <= price < math.inf for price in self.prices)
        ):
            raise ValueError(
                f"prices must be two, of prompt and sampled tokens, 0 or more; got {self.prices}"
            )
        if self.max_price is None:
            return
        if not 0 < self.max_price < math.inf:
            raise ValueError(f"a judge's budget of money must be above 0, or left out; got {self.max_price}")
        if not self.prices or max(self.prices) == 0:
            raise ValueError(
                f"judge_max_price={self.max_price} needs prices to count with, like judge_prices=[0.15, 0.6]; got "
                f"{self.prices}"
            )

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine."""
        return urlsplit(self.url).hostname in _LOOPBACK

    def key(self) -> str | None:
        """The key in the environment; ``None`` where none is sent. `ValueError` if it is needed and not there."""
        is_secure = self.url.startswith("https://")
        name = self.key_variable or (DEFAULT_KEY_VARIABLE if is_secure else None)
        if name is None:
            return None
        key = os.environ.get(name, "").strip()
        if not key and not (self.is_local and self.key_variable is None):
            raise ValueError(
                f"the judge at {self.url} needs a key, and the environment variable {name} is not set; set it, or name "
                "another variable with judge_key_variable=NAME"
            )
        return key or None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """One sampled token, and what else could have stood there."""

    text: str
    alternatives: tuple[tuple[str, float], ...]
    """Text and log-probability, the token itself among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """A chat completion."""

    text: str
    tokens: tuple[TokenChoice, ...]
    """Empty if the endpoint returned no log-probabilities."""
    is_cut: bool = False
    """Whether it ended at the token limit."""

    @property
    def without_thinking(self) -> str:
        """The text behind the last end of thinking, if there is one."""
        return self.text.rpartition(_THOUGHT_END)[2]


@dataclass(slots=True, kw_only=True)
class EndpointUsage:
    """Requests and tokens so far, and their cost."""

    requests: int = 0
    """Sent, attempts included."""
    kept: int = 0
    failed: int = 0
    """Questions that got no answer."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    unmetered: int = 0
    """Answers whose tokens the endpoint did not tell; a token is counted for every four characters of them."""

    @property
    def total_tokens(self) -> int:
        """Read and sampled."""
        return self.prompt_tokens + self.sampled_tokens

    def price(self, prices: tuple[float, float]) -> float:
        """In the prices' currency."""
        return (self.prompt_tokens * prices[0] + self.sampled_tokens * prices[1]) / 1e6


class ChatEndpoint:
    """Asks one model at one endpoint, from the first question until it is closed, or as a context manager.

    Args:
        options: The endpoint.
        kept: Answers of earlier times.
        usage: What of the budget was used before.
        pause: Waits for some seconds.
    """

    def __init__(
        self,
        options: EndpointOptions,
        kept: KeptAnswers | None = None,
        *,
        usage: EndpointUsage | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.options = options
        self.usage = usage or EndpointUsage()
        self._kept = kept
        self._pause = pause
        self._key = options.key()
        self._client: httpx.AsyncClient | None = None
        self._slots = asyncio.Semaphore(options.concurrency)
        self._asking: dict[str, asyncio.Lock] = {}
        self._refusal: str | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def ask(self, messages: Sequence[Message], *, max_tokens: int, top_logprobs: int = 0) -> ChatAnswer:
        """The answer to messages, sampled at temperature 0; the same messages are asked once.

        Raises:
            EndpointError: If there is no answer.
            EndpointStoppedError: If there will be none to further questions either.
        """
        body: dict[str, object] = {
            "model": self.options.model,
            "messages": [
                {"role": each["role"], "content": encodable(str(each["content"]))} for each in messages
            ],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        if top_logprobs:
            body |= {"logprobs": True, "top_logprobs": top_logprobs}
        body = {name: value for name, value in (body | dict(self.options.body)).items() if value is not None}
        key = _digest(self.options.url, body)
        async with self._asking.setdefault(key, asyncio.Lock()):
            try:
                return await self._ask(key, body)
            finally:
                self._asking.pop(key, None)  # whoever waits for it finds the answer that is kept

    async def _ask(self, key: str, body: Mapping[str, object]) -> ChatAnswer:
        kept = None if self._kept is None else self._kept.get(key)
        if kept is not None:
            answer = self._parsed(kept)
            self._count(kept, body, answer, is_kept=True)
            return answer
        try:
            async with self._slots:
                content = await self._answered(body)
            answer = self._parsed(content)
        except EndpointError:
            self.usage.failed += 1
            raise
        prompt, sampled = self._count(content, body, answer, is_kept=False)
        if self._kept is not None:
            usage = {"prompt_tokens": prompt, "completion_tokens": sampled}
            self._kept.put(key, _essence(content, answer) | {"usage": usage})
        return answer

    async def _answered(self, body: Mapping[str, object]) -> dict[str, Any]:
        """The first good answer of several attempts."""
        reason = ""
        for attempt in range(self.options.retries + 1):
            self._check_budget()
            self.usage.requests += 1
            status, content, retry_after = await self._attempt(body)
            if status == 200:
                found = _object(content)
                if found is None:
                    raise EndpointError(f"{self._reason(200, content)}: no chat completion")
                return found
            reason = self._reason(status, content)
            if status in _REFUSED:
                if status in (401, 403):
                    reason += "; judge_key_variable=NAME says which environment variable holds its key"
                self._refusal = reason
                raise EndpointStoppedError(reason)
            if 0 < status < 500 and status not in _BUSY:
                raise EndpointError(reason)
            wait = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S) if retry_after is None else retry_after
            if wait > _LONGEST_WAIT_S:
                raise EndpointError(f"{reason}; it asks to wait {wait:.0f} s, which is too long")
            if attempt < self.options.retries:
                await self._pause(wait)
        raise EndpointError(f"{reason}; given up after {self.options.retries + 1} attempts")

    def _check_budget(self) -> None:
        if self._refusal is not None:
            raise EndpointStoppedError(self._refusal)
        price = 0.0 if self.options.prices is None else self.usage.price(self.options.prices)
        for spent, budget, noun, name in (
            (self.usage.requests, self.options.max_requests, " requests", "judge_max_requests"),
            (self.usage.total_tokens, self.options.max_total_tokens, " tokens", "judge_max_total_tokens"),
            (price, self.options.max_price, "", "judge_max_price"),
        ):
            if budget is not None and spent >= budget:
                raise EndpointStoppedError(
                    f"the judge's budget of {budget:,}{noun} is spent; raise {name} and repeat: answers are kept"
                )

    async def _attempt(self, body: Mapping[str, object]) -> tuple[int, bytes, float | None]:
        """Status, content and seconds to wait; the status is 0 if there was no answer."""
        if self._client is None:
            self._client = httpx.AsyncClient(
                base_url=self.options.url.rstrip("/") + "/",
                headers={} if self._key is None else {"Authorization": f"Bearer {self._key}"},
                timeout=self.options.timeout_s,
                trust_env=not self.options.is_local,
            )
        try:
            async with (
                asyncio.timeout(self.options.timeout_s),
                self._client.stream("POST", "chat/completions", json=body) as response,
            ):
                content = bytearray()
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > _LARGEST_ANSWER:
                        raise EndpointError(
                            f"{self.options.url} answered with more than {_LARGEST_ANSWER} bytes"
                        )
                return response.status_code, bytes(content), _seconds(response.headers.get("retry-after"))
        except (TimeoutError, httpx.TimeoutException):
            return 0, f"no answer within {self.options.timeout_s:g} s".encode(), None
        except httpx.HTTPError as error:
            return 0, (str(error) or type(error).__name__).encode(), None

    def _reason(self, status: int, content: bytes) -> str:
        """One line of what went wrong."""
        text = content.decode("utf-8", "replace")
        error = (_object(text) or {}).get("error")
        if isinstance(error, dict):
            text = str(error.get("message", text))
        elif isinstance(error, str):
            text = error
        text = " ".join(text.split())[:_LONGEST_REASON]
        if self._key is not None:
            text = text.replace(self._key, "***")
        return f"{self.options.url}: {f'status {status}: ' if status else ''}{text or 'no text'}"

    def _parsed(self, content: Mapping[str, Any]) -> ChatAnswer:
        try:
            choice = content["choices"][0]
            text = choice["message"].get("content") or ""
            if not isinstance(text, str):
                raise TypeError
            is_cut = choice.get("finish_reason") == "length"
            return ChatAnswer(text=text, tokens=_tokens(choice.get("logprobs")), is_cut=is_cut)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise EndpointError(
                f"{self.options.url}: no chat completion: {json.dumps(content)[:_LONGEST_REASON]}"
            ) from None

    def _count(
        self, content: Mapping[str, object], body: Mapping[str, Any], answer: ChatAnswer, *, is_kept: bool
    ) -> tuple[int, int]:
        """Count an answer's tokens, read and sampled."""
        usage = content.get("usage")
        told = usage if isinstance(usage, dict) else {}
        prompt, sampled = told.get("prompt_tokens"), told.get("completion_tokens")
        if not isinstance(prompt, int) or not isinstance(sampled, int) or min(prompt, sampled) < 0:
            if not is_kept:
                self.usage.unmetered += 1
            prompt = sum(len(str(each["content"])) for each in body["messages"]) // 4
            sampled = len(answer.text) // 4
        count_tokens("judge", prompt=prompt, sampled=sampled)
        if is_kept:  # paid for when it was asked
            self.usage.kept += 1
        else:
            self.usage.prompt_tokens += prompt
            self.usage.sampled_tokens += sampled
        return prompt, sampled


def _object(content: str | bytes) -> dict[str, Any] | None:
    """The JSON object that an answer is, if it is one."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _digest(url: str, body: Mapping[str, object]) -> str:
    """Digest of body and address: servers give different models the same name."""
    text = json.dumps([url, body], sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _essence(content: Mapping[str, object], answer: ChatAnswer) -> dict[str, object]:
    """The part of an answer that is kept, in the endpoint's own form."""
    kept: dict[str, object] = {"message": {"content": answer.text}}
    if answer.is_cut:
        kept["finish_reason"] = "length"
    if answer.tokens:
        rows = [
            {
                "token": token.text,
                "logprob": dict(token.alternatives).get(token.text),
                "top_logprobs": [{"token": text, "logprob": value} for text, value in token.alternatives],
            }
            for token in answer.tokens
        ]
        kept["logprobs"] = {"content": rows}
    return {"model": content.get("model"), "choices": [kept]}


def _tokens(logprobs: object) -> tuple[TokenChoice, ...]:
    rows = logprobs.get("content") if isinstance(logprobs, dict) else None
    found: list[TokenChoice] = []
    for row in rows or ():
        pairs = [
            (str(each["token"]), float(each["logprob"])) for each in (row, *(row.get("top_logprobs") or ()))
        ]
        found.append(TokenChoice(text=str(row["token"]), alternatives=tuple(dict(pairs).items())))
    return tuple(found)


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After header, which may be a date."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            moment = email.utils.parsedate_to_datetime(retry_after)
        except ValueError:
            return None
        aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        seconds = (aware - datetime.now(UTC)).total_seconds()
    return None if math.isnan(seconds) else max(0.0, seconds)
