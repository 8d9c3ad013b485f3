"""Protocols of an engine's clients: the part of the tinker SDK's client interface that the loop calls.

The SDK's clients, the embedded engine's and the scripted ones of `viva.testing` all fit. Futures are awaited, which
every version of the SDK supports; the deprecated ``*_async`` twins are not used.
"""

import inspect
from collections.abc import Awaitable
from typing import Any, Protocol, runtime_checkable

import tinker


class TrainingClient(Protocol):
    """The weights being trained and their optimiser."""

    def forward_backward(
        self, data: list[tinker.Datum], loss_fn: Any, loss_fn_config: dict[str, float] | None = None
    ) -> Awaitable[tinker.ForwardBackwardOutput]:
        """Add the gradient of the loss, summed over the data."""
        ...

    def forward(
        self, data: list[tinker.Datum], loss_fn: Any, loss_fn_config: dict[str, float] | None = None
    ) -> Awaitable[tinker.ForwardBackwardOutput]:
        """The loss without its gradient."""
        ...

    def optim_step(self, adam_params: tinker.AdamParams) -> Awaitable[tinker.OptimStepResponse]:
        """Update the weights with the accumulated gradient."""
        ...

    def save_state(self, name: str, ttl_seconds: int | None = None) -> Awaitable[Any]:
        """Save weights and optimiser; the response has a ``path``. ``None``: never to be deleted."""
        ...

    def save_weights_and_get_sampling_client(self) -> Any:
        """A snapshot for sampling; use `settled`."""
        ...

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        ...


@runtime_checkable
class ExtendedTrainingClient(Protocol):
    """A training client that declares what it takes beyond the SDK's interface, as the embedded engine's does."""

    takes_mask: bool
    """Whether datums may have a ``mask``, which saves it what the mask hides."""
    takes_temperature: bool
    """Whether ``forward`` with ``cross_entropy`` can score at another temperature than 1."""


@runtime_checkable
class JoinedSamplingClient(Protocol):
    """A sampling client that declares whether it computes the answers to concurrent calls together."""

    answers_together: bool


def takes_mask(client: TrainingClient) -> bool:
    """Whether the client's datums may have a ``mask``; servers know only advantages."""
    return isinstance(client, ExtendedTrainingClient) and client.takes_mask


def takes_temperature(client: TrainingClient) -> bool:
    """Whether the client can score at another temperature than 1."""
    return isinstance(client, ExtendedTrainingClient) and client.takes_temperature


def answers_together(client: object) -> bool:
    """Whether a sampling client computes the answers to concurrent calls together."""
    return isinstance(client, JoinedSamplingClient) and client.answers_together


class ServiceClient(Protocol):
    """Makes training and sampling clients; use `settled` on what it returns."""

    def create_lora_training_client(self, base_model: str, rank: int = 32, seed: int | None = None) -> Any:
        """A new adapter on a base model."""
        ...

    def create_training_client_from_state(self, path: str, base_model: str | None = None) -> Any:
        """A training client with saved weights and a fresh optimiser."""
        ...

    def create_training_client_from_state_with_optimizer(
        self, path: str, base_model: str | None = None
    ) -> Any:
        """A training client that continues from a saved state."""
        ...

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> Any:
        """A sampling client for saved weights or the base model."""
        ...


async def settled(pending: Any) -> Any:
    """A client, from a future of it (newer SDKs) or itself (older ones)."""
    return await pending if inspect.isawaitable(pending) else pending
