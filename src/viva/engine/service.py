"""``tinker.ServiceClient``, in this process."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import tinker
from tinker import types

from viva.engine.core import Core
from viva.engine.futures import LocalFuture
from viva.engine.limits import EngineLimits
from viva.engine.lora import AdapterSettings
from viva.engine.model import decode_precision, resolve_device, resolve_precision
from viva.engine.policy import Policy
from viva.engine.rest import LocalRestClient
from viva.engine.sampling_client import LocalSamplingClient
from viva.engine.sdk import refuses_the_rest
from viva.engine.states import open_policy, open_sampling_client
from viva.engine.training_client import LocalTrainingClient

__all__ = ["LocalServiceClient"]


@refuses_the_rest(tinker.ServiceClient)
class LocalServiceClient:
    """Creates training and sampling clients that compute in this process.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``...; ``None`` takes a GPU if there is one.
        precision: ``"float32"`` is exact: sampler and trainer agree. ``"fast"`` samples from a bfloat16 copy of float32
            weights. ``"bfloat16"`` is for base weights of half the size. What is trained is always float32.
        state_dir: Folder for ``save_state`` and ``save_weights_for_sampler``. Every training client that saves takes a
            folder of its own in it, so that equal names of two clients, services or processes never meet.
        one_run: The ``state_dir`` itself is the folder of the only training client that saves; another one is refused.
            For a run that goes on in later processes, one at a time.
        seed: From which seeds that are not given are derived.
        limits: Batch sizes.

    Raises:
        ValueError: An unknown precision, one this processor is slow at, or a device that is not there.
    """

    def __init__(
        self,
        *,
        device: str | None = None,
        precision: str = "float32",
        state_dir: str | Path | None = None,
        one_run: bool = False,
        seed: int = 0,
        limits: EngineLimits | None = None,
    ) -> None:
        self._core = Core(
            device=resolve_device(device),
            dtype=resolve_precision(precision),
            decode_dtype=decode_precision(precision, resolve_device(device)),
            state_dir=None if state_dir is None else Path(state_dir).absolute(),
            one_run=one_run,
            seed=seed,
            limits=limits or EngineLimits(),
        )

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
    ) -> LocalTrainingClient:
        """A training client with a new adapter (alpha 32), or with ``rank=0`` for all weights.

        Args:
            base_model: Local folder or hub name.
            rank: Of the adapter.
            seed: Of the adapter's starting values; ``None`` derives one from the service's seed.
            train_mlp: Adapt the feed-forward layers.
            train_attn: Adapt the attention's projections.
            train_unembed: Adapt the output layer.
            user_metadata: Stored with checkpoints.

        Raises:
            ValueError: A setting out of range, or a model the engine cannot run.
        """
        number = self._core.count("training")
        settings = AdapterSettings(
            rank=rank,
            seed=self._core.derived_seed("adapter", number) if seed is None else seed,
            train_mlp=train_mlp,
            train_attn=train_attn,
            train_unembed=train_unembed,
        )
        policy = Policy(self._core.base_model(base_model), settings, self._core.limits)
        return LocalTrainingClient(self._core, policy, f"local-{number}", user_metadata)

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
    ) -> LocalTrainingClient:
        """`create_lora_training_client`, awaited."""
        return self.create_lora_training_client(
            base_model, rank, seed, train_mlp, train_attn, train_unembed, user_metadata
        )

    def create_training_client_from_state(
        self, path: str, base_model: str | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> LocalTrainingClient:
        """A training client with saved weights and a fresh optimiser.

        Args:
            path: Returned by ``save_state``.
            base_model: Where the base model is now, if it has moved.
            user_metadata: Stored with checkpoints; ``None`` keeps what was stored.

        Raises:
            ValueError: The checkpoint cannot be read.
        """
        return self._from_state(path, base_model, user_metadata, optimizer=False)

    async def create_training_client_from_state_async(
        self, path: str, base_model: str | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> LocalTrainingClient:
        """`create_training_client_from_state`, awaited."""
        return self.create_training_client_from_state(path, base_model, user_metadata)

    def create_training_client_from_state_with_optimizer(
        self, path: str, base_model: str | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> LocalTrainingClient:
        """A training client with saved weights and optimiser: the next step is the one that would have followed."""
        return self._from_state(path, base_model, user_metadata, optimizer=True)

    async def create_training_client_from_state_with_optimizer_async(
        self, path: str, base_model: str | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> LocalTrainingClient:
        """`create_training_client_from_state_with_optimizer`, awaited."""
        return self.create_training_client_from_state_with_optimizer(path, base_model, user_metadata)

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> LocalSamplingClient:
        """A sampling client for saved weights (``model_path``) or a base model as it is (``base_model``).

        With both, ``base_model`` says where the base of the saved weights is now.

        Raises:
            ValueError: Neither is given, or the checkpoint cannot be read.
        """
        return open_sampling_client(self._core, model_path, base_model)

    async def create_sampling_client_async(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> LocalSamplingClient:
        """`create_sampling_client`, awaited."""
        return self.create_sampling_client(model_path, base_model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("success" if error is None else "errored")

    def close(
        self, status: Literal["success", "errored", "interrupted"] = "success", detail: str | None = None
    ) -> LocalFuture[None]:
        """End the session, as servers call it. There is none here: clients that were made can still be used."""
        future: LocalFuture[None] = LocalFuture(self._core.pump, cancellable=False)
        future.resolve(None)
        return future

    def get_telemetry(self) -> None:
        """Nothing is reported to anybody."""

    def create_rest_client(self) -> LocalRestClient:
        """A client that looks after checkpoints."""
        return LocalRestClient(self._core)

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        """The models loaded so far. Others can be loaded: any local folder or hub name of a supported architecture."""
        known = types.SupportedModel.model_fields  # older SDKs have the name alone
        models: list[types.SupportedModel] = []
        for name in self._core.model_names:
            told: dict[str, Any] = {
                "model_name": name,
                "max_context_length": self._core.base_model(name).context_length,
                "trainable": True,
                "sampleable": True,
            }
            models.append(types.SupportedModel(**{key: told[key] for key in told if key in known}))
        return types.GetServerCapabilitiesResponse(supported_models=models)

    async def get_server_capabilities_async(self) -> types.GetServerCapabilitiesResponse:
        """`get_server_capabilities`, awaited."""
        return self.get_server_capabilities()

    def _from_state(
        self, path: str, base_model: str | None, user_metadata: Mapping[str, str] | None, *, optimizer: bool
    ) -> LocalTrainingClient:
        policy, state = open_policy(self._core, path, base_model, optimizer=optimizer)
        number = self._core.count("training")
        metadata = state.user_metadata if user_metadata is None else user_metadata
        return LocalTrainingClient(self._core, policy, f"local-{number}", metadata)
