"""A sampler whose calls fail in nine ways, by a draw that depends on the call alone."""

import asyncio
import hashlib
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import tinker

from viva.sdk import make_response

WAYS = ("timeout", "429", "500", "409", "hang", "malformed", "empty", "nan_logprob", "cancelled")

_STATUS = {"429": tinker.RateLimitError, "500": tinker.InternalServerError, "409": tinker.ConflictError}


def chance(*parts: Any) -> float:
    """A number in [0, 1) that depends on these values alone."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


class FailingSampler:
    """Passes calls on; a share of them fails.

    Whether and how depends on seed, prompt and settings of the call, and on how often the same was asked before: not
    on time, nor on what else is asked.
    """

    def __init__(
        self, inner: Any, *, share: float, seed: int, hang_share: float = 1 / len(WAYS), max_latency: int = 0
    ):
        self.inner, self.share, self.seed = inner, share, seed
        self.hang_share = hang_share
        """Of the failing calls. A test that waits for the clock wants few."""
        self.max_latency = max_latency
        """How often a call may give way to others before it is passed on."""
        self.abandons = False
        """Whether calls that fail without an answer were begun, and are given up on the way."""
        self.latency_seed = 0
        self.failed: Counter[str] = Counter()
        self.num_calls = 0
        self._asked: Counter[bytes] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def sample(
        self, prompt: Any, num_samples: int, sampling_params: Any, **options: Any
    ) -> asyncio.Task[Any]:
        asked = hashlib.sha256(
            repr((prompt.to_ints(), num_samples, sampling_params, sorted(options.items()))).encode()
        ).digest()
        number = self._asked[asked]
        self._asked[asked] += 1
        return asyncio.ensure_future(
            self._answer((asked, number), prompt, num_samples, sampling_params, options)
        )

    async def _answer(
        self, call: tuple[bytes, int], prompt: Any, num_samples: int, params: Any, options: dict[str, Any]
    ) -> Any:
        self.num_calls += 1
        way = self._way(call)
        if self.max_latency:
            for _ in range(int(chance(self.latency_seed, "latency", call) * self.max_latency)):
                await asyncio.sleep(0)
        if way is not None:
            self.failed[way] += 1
        if way in ("malformed", "empty", "nan_logprob"):
            response = await self.inner.sample(prompt, num_samples, params, **options)
            return spoiled(response, way, chance(self.seed, "spoil", call))
        if way is not None and self.abandons:
            pending = asyncio.ensure_future(self.inner.sample(prompt, num_samples, params, **options))
            for _ in range(int(chance(self.seed, "given up", call) * 60)):
                await asyncio.sleep(0)
            pending.cancel()
        await _fail(way)
        return await self.inner.sample(prompt, num_samples, params, **options)

    def _way(self, call: tuple[bytes, int]) -> str | None:
        if chance(self.seed, "fails", call) >= self.share:
            return None
        if chance(self.seed, "hangs", call) < self.hang_share:
            return "hang"
        others = [way for way in WAYS if way != "hang"]
        return others[int(chance(self.seed, "way", call) * len(others))]

    def forget(self) -> None:
        """Calls that were asked before count as new."""
        self._asked.clear()


async def _fail(way: str | None) -> None:
    if way == "hang":
        await asyncio.Event().wait()
    if way == "timeout":
        raise TimeoutError("the call took too long")
    if way == "cancelled":
        raise asyncio.CancelledError("the server cancelled the call")
    if way in _STATUS:
        request = httpx.Request("POST", "http://localhost/sample")
        response = httpx.Response(int(way), request=request)
        raise _STATUS[way](f"the server answered {way}", response=response, body=None)


def spoiled(response: Any, way: str, draw: float) -> Any:
    """A response as an engine with a fault gives it: cut, without a token, or with a logprob that is no number."""
    return make_response([_spoiled(sequence, way, draw) for sequence in response.sequences], {})


def _spoiled(sequence: tinker.SampledSequence, way: str, draw: float) -> tinker.SampledSequence:
    logprobs = np.array(sequence.logprobs, dtype=np.float32)
    end = len(logprobs)
    if way == "nan_logprob":
        logprobs[int(draw * end)] = (math.nan, math.inf, -math.inf)[int(draw * 30) % 3]
        topk = getattr(sequence, "topk_logprobs_np", None)
        if topk is not None:
            topk = replace(topk, logprobs=np.full_like(topk.logprobs, math.nan))
        return replace(sequence, logprobs_np=logprobs, topk_logprobs_np=topk)
    if way == "malformed" and int(draw * 1000) % 2:  # one logprob is missing
        return replace(sequence, logprobs_np=logprobs[:-1], topk_logprobs_np=None)
    end = 0 if way == "empty" else end // 2
    tokens = np.array(sequence.tokens[:end], dtype=np.int32)  # breaks off, with half a character
    return replace(
        sequence, tokens_np=tokens, logprobs_np=logprobs[:end], topk_logprobs_np=None, stop_reason="length"
    )
