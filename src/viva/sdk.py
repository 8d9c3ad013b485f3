"""The tinker SDK as the loop sees it: protocols of an engine's clients, and response types across the SDK's versions.

The SDK's clients, the embedded engine's and the scripted ones of `viva.testing` all fit the protocols. Futures are
awaited, which every version of the SDK supports; the deprecated ``*_async`` twins are not used.

Version 0.22, the last one that SkyRL's servers answer to, has no sequence ids, no alternatives to sampled tokens and no
chosen targets: ids are left out there, and asking for the others is refused.
"""

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import fields
from functools import wraps
from typing import Any, Literal, NoReturn, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import tinker

T = TypeVar("T")


class TrainingClient(Protocol):
    """The weights being trained and their optimiser."""

    def forward_backward(
        self, data: list[tinker.Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Awaitable[tinker.ForwardBackwardOutput]:
        """Add the gradient of the loss, summed over the data."""
        ...

    def forward(
        self, data: list[tinker.Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Awaitable[tinker.ForwardBackwardOutput]:
        """The loss without its gradient."""
        ...

    def optim_step(self, adam_params: tinker.AdamParams, /) -> Awaitable[tinker.OptimStepResponse]:
        """Update the weights with the accumulated gradient."""
        ...

    def save_state(
        self, name: str, ttl_seconds: int | None = None
    ) -> Awaitable[tinker.types.SaveWeightsResponse]:
        """Save weights and optimiser; the response has a ``path``. ``None``: never to be deleted."""
        ...

    def save_weights_and_get_sampling_client(self) -> Any:
        """A snapshot for sampling; use `settled`."""
        ...

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None
    ) -> Awaitable[tinker.types.SaveWeightsForSamplerResponse]:
        """Save weights for sampling; the response has a ``path``."""
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
class PreciseTrainingClient(Protocol):
    """A training client that names the precision it computes in, as the embedded engine's does."""

    @property
    def precision(self) -> str:
        """The name, such as ``float32``."""
        ...


@runtime_checkable
class AveragingTrainingClient(Protocol):
    """A training client that keeps an exponential moving average of what it trains, as the embedded engine's does."""

    def begin_average(self) -> Awaitable[None]:
        """Begin it at the present weights; it is saved and loaded with the optimiser."""
        ...

    def update_average(self, decay: float) -> Awaitable[None]:
        """Move it to ``decay`` of itself and ``1 - decay`` of the present weights."""
        ...

    def save_average_and_get_sampling_client(self) -> Any:
        """A snapshot of it for sampling; use `settled`."""
        ...


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


Ending = Literal["success", "errored", "interrupted"]
"""The end of a session's use, in the SDK's words."""


Pending = Awaitable[TrainingClient] | TrainingClient
"""A training client, or a future of it."""


class ServiceClient(Protocol):
    """Makes training and sampling clients; use `settled` on what it returns."""

    def create_lora_training_client(
        self, base_model: str, rank: int = 32, seed: int | None = None
    ) -> Pending:
        """A new adapter on a base model."""
        ...

    def create_training_client_from_state(self, path: str, base_model: str | None = None) -> Pending:
        """A training client with saved weights and a fresh optimiser."""
        ...

    def create_training_client_from_state_with_optimizer(
        self, path: str, base_model: str | None = None
    ) -> Pending:
        """A training client that continues from a saved state."""
        ...

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> Any:
        """A sampling client for saved weights or the base model."""
        ...

    def close(self, status: Ending) -> Awaitable[None]:
        """End the session with the server; see `viva.training.service.end_session`."""
        ...


async def settled(pending: Awaitable[T] | T) -> T:
    """A client, from a future of it (newer SDKs) or itself (older ones)."""
    return await cast("Awaitable[T]", pending) if inspect.isawaitable(pending) else pending


try:
    from tinker.types.topk_logprobs import TopkLogprobs
except ImportError:  # older versions
    from tinker.types.topk_prompt_logprobs import (  # pyright: ignore[reportMissingImports]
        TopkPromptLogprobs as TopkLogprobs,
    )


ClassT = TypeVar("ClassT", bound=type)
P = ParamSpec("P")

_INSTEAD = {
    "create_custom_loss": "forward_backward_custom takes a function",
    "copy_weights": "copy the checkpoint's folder",
    "save_weights_external": "save_weights_for_sampler writes a folder that peft or transformers reads",
    "get_sampler_handle": "give the path of saved weights to create_sampling_client",
    "from_sampler_handle": "give the path of saved weights to create_sampling_client",
    "create": "call create_sampling_client of a service or training client",
    "get_console_url": "viva view shows a run",
}

_MASK_LOGPROB = -99999.0
_SEQUENCE_FIELDS = frozenset(field.name for field in fields(tinker.SampledSequence))
_RESPONSE_FIELDS = frozenset(field.name for field in fields(tinker.SampleResponse))


def refuses_the_rest(sdk_class: type) -> Callable[[ClassT], ClassT]:
    """A class decorator: public methods that the installed SDK's class has and this one lacks say so in a sentence.

    They raise `NotImplementedError` when they are called.
    """

    def complete(local_class: ClassT) -> ClassT:
        for name, member in inspect.getmembers_static(sdk_class):
            is_method = callable(member) or isinstance(member, staticmethod | classmethod)
            if is_method and not name.startswith("_") and not hasattr(local_class, name):
                setattr(local_class, name, staticmethod(_refusal(name)))
        return local_class

    return complete


def _refusal(name: str) -> Callable[..., NoReturn]:
    instead = _INSTEAD.get(name.removesuffix("_async"))
    message = f"{name} is answered by Tinker's servers, and the local engine has nothing like it. " + (
        f"Instead: {instead}." if instead else "Use a server for it, or leave it out."
    )

    def refuse(*_args: object, **_options: object) -> NoReturn:
        raise NotImplementedError(message)

    refuse.__name__ = name
    refuse.__doc__ = message
    return refuse


def async_twin(method: Callable[P, T]) -> Callable[P, Coroutine[object, None, T]]:
    """The ``_async`` twin of a method, which older SDKs have beside it; awaiting it calls the method."""

    @wraps(method)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        return method(*args, **kwargs)

    return _named_twin(twin, method)


def awaited_twin(method: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[object, None, T]]:
    """The ``_async`` twin of a method; awaiting it calls the method and awaits the future that this returns."""

    @wraps(method)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        return await method(*args, **kwargs)

    return _named_twin(twin, method)


def _named_twin(twin: Callable[P, T], method: Callable[P, object]) -> Callable[P, T]:
    name = f"{method.__name__}_async"
    twin.__name__, twin.__qualname__ = name, f"{method.__qualname__}_async"
    twin.__doc__ = f"`{method.__name__}`, awaited."
    return twin


def check_carried(*, topk_sample_logprobs: bool, target_prompt_logprobs: bool) -> None:
    """Refuse to compute what the installed SDK's responses cannot carry, by a `ValueError`."""
    for name, asked, field, known in (
        ("topk_sample_logprobs", topk_sample_logprobs, "topk_logprobs_np", _SEQUENCE_FIELDS),
        ("target_prompt_logprobs", target_prompt_logprobs, "target_prompt_logprobs", _RESPONSE_FIELDS),
    ):
        if asked and field not in known:
            raise ValueError(f"tinker {tinker.__version__} has no place for {name}. Install a newer version.")


def make_topk(token_ids: np.ndarray, logprobs: np.ndarray) -> Any:
    """The SDK's pair of ``[length, k]`` matrices, with its sentinel where there is no token."""
    absent = ~np.isfinite(logprobs)
    return TopkLogprobs(
        token_ids=np.where(absent, 0, token_ids).astype(np.int32),
        logprobs=np.where(absent, _MASK_LOGPROB, logprobs).astype(np.float32),
    )


def make_sequence(
    *,
    stop_reason: Literal["stop", "length"],
    sequence_id: str,
    tokens: list[int],
    logprobs: list[float],
    topk: tuple[np.ndarray, np.ndarray] | None,
) -> tinker.SampledSequence:
    """One sampled sequence; its id is distinct within the service, its tokens include the one that ended it.

    `topk` are ``[length, k]`` alternatives and their logprobs.
    """
    values: dict[str, Any] = {
        "stop_reason": stop_reason,
        "sequence_id": sequence_id,
        "tokens_np": np.asarray(tokens, dtype=np.int32),
        "logprobs_np": np.asarray(logprobs, dtype=np.float32),
        "topk_logprobs_np": None if topk is None else make_topk(*topk),
    }
    return tinker.SampledSequence(
        **{name: value for name, value in values.items() if name in _SEQUENCE_FIELDS}
    )


def make_response(
    sequences: list[tinker.SampledSequence], prompt_fields: dict[str, Any]
) -> tinker.SampleResponse:
    """The response of a request, with the fields that concern its prompt."""
    known = {name: value for name, value in prompt_fields.items() if name in _RESPONSE_FIELDS}
    return tinker.SampleResponse(sequences=sequences, **known)
