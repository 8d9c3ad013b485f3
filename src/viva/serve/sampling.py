"""Sampling for a request, in pieces that answers and streams are both made of, and the text of a sample."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import tinker
from tinker_cookbook.renderers.base import Renderer

from viva.conversation.coordinator import gather_or_cancel
from viva.conversation.guard import GuardedTokenizer
from viva.engine.requests import Drawn
from viva.engine.sampling_client import LocalSamplingClient

Alternatives = tuple[tuple[int, str, float], ...]
"""Token id, text and log-probability, most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A sampled token."""

    id: int
    text: str
    """On its own; U+FFFD stands for parts of characters."""
    logprob: float
    """Under the distribution that it was drawn from."""
    alternatives: Alternatives


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One more token of one sample."""

    choice: int
    """Index of the sample in the answer."""
    token: Token
    text: str
    """Text that is certain now; it may belong to earlier tokens, and be empty."""
    finish_reason: str | None
    """``stop`` or ``length`` at the end of the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """A prompt as the model saw it."""

    tokens: tuple[int, ...]
    logprobs: tuple[Alternatives | None, ...] = ()
    """Per token itself and the alternatives; ``None`` for the first. Empty if none were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingJob:
    """Samples to draw."""

    prompts: tuple[tuple[int, ...], ...]
    num_samples: int = 1
    """Samples of each prompt; the choices of one prompt follow those of the one before."""
    params: tinker.SamplingParams = field(default_factory=tinker.SamplingParams)
    """Its ``stop`` is a list of strings."""
    end_ids: tuple[int, ...] = ()
    """Token ids that end a sample."""
    num_alternatives: int = 0
    num_prompt_alternatives: int | None = None
    """``None``: the prompt is not scored."""


_MOST_UNREAD = 8
"""Tokens that may wait for the rest of a character. It has at most four bytes, so what takes longer is none."""
_BROKEN = "\ufffd"


class SampleText:
    """Text of one sample, handed out as far as later tokens cannot change it.

    The pieces together are the text: a stop string, what follows it, and tokens that end a sample are no part of it.
    """

    def __init__(self, tokenizer: Any, end_ids: Collection[int], stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._stops = stops
        self._tokens: list[int] = []
        self._start = self._read = 0
        self._held = ""
        self._is_over = False

    def feed(self, token: int) -> str:
        """The text that is certain now that this token is known."""
        if self._is_over:
            return ""
        if token in self._end_ids:
            return self.finish()
        self._tokens.append(token)
        return self._release(self._next())

    def finish(self) -> str:
        """The rest of the text."""
        if self._is_over:
            return ""
        rest = self._decode(self._start)[len(self._decode(self._start, self._read)) :]
        released = self._release(rest) + self._held
        self._is_over, self._held = True, ""
        return released

    def _next(self) -> str:
        before, text = self._decode(self._start, self._read), self._decode(self._start)
        is_whole = len(text) > len(before) and not text.endswith(_BROKEN)
        if not is_whole and len(self._tokens) - self._read < _MOST_UNREAD:
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return text[len(before) :]

    def _release(self, text: str) -> str:
        """Text that no stop string can begin in; at a stop string the text is over."""
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self._is_over, self._held = True, ""
            return text[: min(places)]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _decode(self, start: int, end: int | None = None) -> str:
        tokens = self._tokens[start:end]
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that a stop string begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def stops_of(renderer: Renderer) -> tuple[list[str], list[int]]:
    """Strings and token ids that end the assistant's turn."""
    stops = renderer.get_stop_sequences()
    strings = [stop for stop in stops if isinstance(stop, str)]
    return strings, [stop for stop in stops if isinstance(stop, int)]


class ServedPolicy:
    """A policy that requests give as ``model`` by its name; it belongs to the engine's thread.

    The renderer is that of its chat format, with a guarded tokenizer.
    """

    def __init__(self, name: str, client: LocalSamplingClient, renderer: Renderer) -> None:
        self.name = name
        self.client = client
        self.renderer = renderer
        self._tokenizer = cast(GuardedTokenizer, renderer.tokenizer)
        self._texts: dict[int, str] = {}

    def text_tokens(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt that is text: none is a control token but those that every text begins with."""
        return tuple(self._tokenizer.encode(self._tokenizer.shield(text)))

    async def sample(self, job: SamplingJob, hear: Callable[[Piece], None]) -> list[ScoredPrompt]:
        """Sample, and hand on every token.

        Raises:
            ValueError: A setting that the model does not take.
            FloatingPointError: The model's logits are no numbers.
        """
        return list(
            await gather_or_cancel(
                self._of_prompt(job, prompt, index * job.num_samples, hear)
                for index, prompt in enumerate(job.prompts)
            )
        )

    async def _of_prompt(
        self, job: SamplingJob, prompt: tuple[int, ...], first: int, hear: Callable[[Piece], None]
    ) -> ScoredPrompt:
        stops = cast("list[str]", job.params.stop)
        texts = [SampleText(self._tokenizer, job.end_ids, stops) for _ in range(job.num_samples)]

        def listen(drawn: Drawn) -> None:
            text = texts[drawn.index].feed(drawn.token)
            if drawn.stop_reason is not None:
                text += texts[drawn.index].finish()
            token = Token(
                id=drawn.token,
                text=self._text(drawn.token),
                logprob=float(np.float32(drawn.logprob)),  # as responses of the engine hold it
                alternatives=() if drawn.alternatives is None else self._alternatives(*drawn.alternatives),
            )
            hear(Piece(choice=first + drawn.index, token=token, text=text, finish_reason=drawn.stop_reason))

        response = await self.client.stream(
            tinker.ModelInput.from_ints(list(prompt)),
            job.num_samples,
            job.params,
            listen,
            stop_ids=job.end_ids,
            topk_sample_logprobs=job.num_alternatives,
            topk_prompt_logprobs=job.num_prompt_alternatives,
        )
        if job.num_prompt_alternatives is None:
            return ScoredPrompt(tokens=prompt)
        return ScoredPrompt(tokens=prompt, logprobs=self._prompt_logprobs(prompt, response))

    def _alternatives(self, ids: np.ndarray, logprobs: np.ndarray) -> Alternatives:
        pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
        return tuple((token, self._text(token), logprob) for token, logprob in pairs if np.isfinite(logprob))

    def _prompt_logprobs(
        self, prompt: tuple[int, ...], response: tinker.SampleResponse
    ) -> tuple[Alternatives | None, ...]:
        """Per token of the prompt the token itself, then the most likely others."""
        own = response.prompt_logprobs or []
        topk = response.topk_prompt_logprobs or [None] * len(own)
        rows: list[Alternatives | None] = []
        for token, logprob, others in zip(prompt, own, topk, strict=True):
            if logprob is None:
                rows.append(None)
                continue
            known = {token: logprob} | {other: value for other, value in others or () if other != token}
            rows.append(tuple((each, self._text(each), value) for each, value in known.items()))
        return tuple(rows)

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = str(self._tokenizer.inner.decode([token]))
        return self._texts[token]
