"""Counting what is sampled, for comparisons at equal numbers of tokens."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any, cast

import tinker

from viva.judging.policy import SamplingClient

__all__ = ["MeteredClient"]


class MeteredClient:
    """A sampling client that passes calls on and counts the tokens of what comes back."""

    def __init__(self, client: SamplingClient) -> None:
        self._client = client
        self.num_tokens = 0
        """Sampled so far, over all samples of all calls."""

        # the signature stays that of the client: judges look there for what it can return
        @functools.wraps(client.sample)
        async def sample(*args: Any, **options: Any) -> tinker.SampleResponse:
            return await self._sample(*args, **options)

        self.sample = sample

    async def _sample(self, *args: Any, **options: Any) -> tinker.SampleResponse:
        pending: Any = self._client.sample(*args, **options)
        if not inspect.isawaitable(pending):
            pending = asyncio.wrap_future(cast("Future[tinker.SampleResponse]", pending))
        response = await cast("Awaitable[tinker.SampleResponse]", pending)
        self.num_tokens += sum(len(sequence.tokens) for sequence in response.sequences)
        return response
