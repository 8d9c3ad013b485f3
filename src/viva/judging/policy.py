"""The policy as the judge sees it: what samples like tinker's ``SamplingClient``, and a place to swap it."""

import asyncio
import inspect
from collections.abc import Awaitable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, cast

import tinker


class SamplingClient(Protocol):
    """The one method of tinker's ``SamplingClient`` that judging needs, with whatever future it returns."""

    def sample(
        self, prompt: tinker.ModelInput, num_samples: int, sampling_params: tinker.SamplingParams
    ) -> Any:
        """Draw completions of one prompt."""
        ...


@dataclass(kw_only=True)
class PolicyRef:
    """Holds the sampling client that judges now.

    The training loop sets it: at every step for a judge that follows the policy, once for one that stays what it
    was.
    """

    sampling_client: SamplingClient | None = None
    timeout_s: float | None = None
    """Longest time one comparison may take. Results then depend on the clock, so it is off by default."""

    def current(self) -> SamplingClient:
        """The client that is set.

        Raises:
            RuntimeError: If none is.
        """
        if self.sampling_client is None:
            raise RuntimeError(
                "the judge has no policy: set PolicyRef.sampling_client to a sampling client before rewards "
                "are computed (the training loop does so at every step)"
            )
        return self.sampling_client


def accepts(client: SamplingClient, option: str) -> bool:
    """Whether the client's ``sample`` takes an option; SDKs and engines differ in what they can return."""
    parameters = inspect.signature(client.sample).parameters
    return option in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


async def sample(
    client: SamplingClient,
    prompt: tinker.ModelInput,
    params: tinker.SamplingParams,
    num_samples: int = 1,
    **options: Any,
) -> tinker.SampleResponse:
    """Completions of a prompt from a client of any version, with further options of its ``sample``."""
    return await response_of(
        cast(Any, client).sample(prompt=prompt, num_samples=num_samples, sampling_params=params, **options)
    )


async def response_of(pending: Any) -> tinker.SampleResponse:
    """The response behind an awaitable, or behind the ``concurrent.futures.Future`` of older clients."""
    if inspect.isawaitable(pending):
        return await cast(Awaitable[tinker.SampleResponse], pending)
    return await asyncio.wrap_future(cast(Future[tinker.SampleResponse], pending))
