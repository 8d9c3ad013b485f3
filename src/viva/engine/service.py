"""``tinker.ServiceClient`` and its REST client, in this process, and the one line that puts them in the SDK's place."""

import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self, cast

import tinker
from tinker import types
from tinker.lib.public_interfaces.rest_client import RestClient

from viva.engine.checkpoint import read_state
from viva.engine.core import Core
from viva.engine.lora import AdapterSettings
from viva.engine.model import decode_precision, resolve_device, resolve_precision
from viva.engine.policy import Policy
from viva.engine.sampling_client import LocalSamplingClient, open_sampling_client
from viva.engine.scheduler import EngineLimits, LocalFuture
from viva.engine.training_client import LocalTrainingClient
from viva.sdk import async_twin, awaited_twin, refuses_the_rest


@refuses_the_rest(RestClient)
class LocalRestClient:
    """Looks after checkpoints. Paths are those that ``save_state`` and ``save_weights_for_sampler`` returned."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def get_telemetry(self) -> None:
        """``None``: the engine reports nothing to anybody."""

    def get_training_run_by_tinker_path(self, tinker_path: str) -> LocalFuture[types.TrainingRun]:
        """The run that a checkpoint is of, with the metadata that was stored.

        Raises:
            ValueError: The checkpoint cannot be read.
        """
        state = read_state(tinker_path)
        run = types.TrainingRun(
            training_run_id=state.folder.absolute().parents[1].name,
            base_model=state.base_model,
            model_owner="local",
            is_lora=state.settings.rank > 0,
            lora_rank=state.settings.rank or None,
            last_request_time=datetime.fromtimestamp(state.folder.stat().st_mtime, UTC),
            user_metadata=state.user_metadata,
        )
        return LocalFuture.resolved(self._core.pump, run)

    get_training_run_by_tinker_path_async = awaited_twin(get_training_run_by_tinker_path)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> LocalFuture[None]:
        """Delete a checkpoint, once the operations called so far are done.

        Raises:
            ValueError: The folder is no checkpoint, or none of this service's ``state_dir``.
        """
        self._core.check_own(Path(tinker_path))
        folder = read_state(tinker_path).folder
        return self._core.operations.call(lambda: shutil.rmtree(folder))

    delete_checkpoint_from_tinker_path_async = awaited_twin(delete_checkpoint_from_tinker_path)


@refuses_the_rest(tinker.ServiceClient)
class LocalServiceClient:
    """Creates training and sampling clients that compute in this process.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``...; ``None`` takes a GPU if there is one.
        precision: ``"float32"`` is exact: sampler and trainer agree. ``"fast"`` samples from a copy of float32
            weights that is in bfloat16, or, on a CPU without instructions for it, has its matrices alone in it.
            ``"bfloat16"`` is for base weights of half the size. What is trained is always float32.
        state_dir: Folder for ``save_state`` and ``save_weights_for_sampler``. Every training client that saves takes a
            folder of its own in it, so that equal names of two clients, services or processes never meet.
        one_run: The ``state_dir`` itself is the folder of all training clients; names that one of them saved under are
            refused to the others. For a run that goes on in later processes, one at a time.
        seed: From which seeds that are not given are derived.
        limits: Batch sizes.
        shared_batch: Sample from all adapters of a base model in one batch over one copy of its weights. Else each
            snapshot is merged into a copy of its own, which is faster where one is asked at a time.

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
        shared_batch: bool = False,
    ) -> None:
        decode_dtype, matrix_dtype = decode_precision(precision, resolve_device(device))
        self._core = Core(
            device=resolve_device(device),
            dtype=resolve_precision(precision),
            decode_dtype=decode_dtype,
            matrix_dtype=matrix_dtype,
            state_dir=None if state_dir is None else Path(state_dir).absolute(),
            one_run=one_run,
            seed=seed,
            limits=limits or EngineLimits(),
            shared_batch=shared_batch,
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

    create_lora_training_client_async = async_twin(create_lora_training_client)

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

    create_training_client_from_state_async = async_twin(create_training_client_from_state)

    def create_training_client_from_state_with_optimizer(
        self, path: str, base_model: str | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> LocalTrainingClient:
        """A training client with saved weights and optimiser: the next step is the one that would have followed."""
        return self._from_state(path, base_model, user_metadata, optimizer=True)

    create_training_client_from_state_with_optimizer_async = async_twin(
        create_training_client_from_state_with_optimizer
    )

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> LocalSamplingClient:
        """A sampling client for saved weights (``model_path``) or a base model as it is (``base_model``).

        With both, ``base_model`` says where the base of the saved weights is now.

        Raises:
            ValueError: Neither is given, or the checkpoint cannot be read.
        """
        return open_sampling_client(self._core, model_path, base_model)

    create_sampling_client_async = async_twin(create_sampling_client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("success" if kind is None else "errored")

    def close(
        self, status: Literal["success", "errored", "interrupted"] = "success", detail: str | None = None
    ) -> LocalFuture[None]:
        """End the session, as servers call it. There is none here: clients that were made can still be used."""
        return LocalFuture.resolved(self._core.pump, None)

    def get_telemetry(self) -> None:
        """``None``: the engine reports nothing to anybody."""

    def create_rest_client(self) -> LocalRestClient:
        """A client that looks after checkpoints."""
        return LocalRestClient(self._core)

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        """The models loaded so far. Others can be loaded: any local folder or hub name of a supported architecture."""
        known = types.SupportedModel.model_fields  # older SDKs have the name alone
        models: list[types.SupportedModel] = []
        for name in self._core.model_names:
            values: dict[str, Any] = {
                "model_name": name,
                "max_context_length": self._core.base_model(name).context_length,
                "trainable": True,
                "sampleable": True,
            }
            models.append(types.SupportedModel(**{key: values[key] for key in values if key in known}))
        return types.GetServerCapabilitiesResponse(supported_models=models)

    get_server_capabilities_async = async_twin(get_server_capabilities)

    def _from_state(
        self, path: str, base_model: str | None, user_metadata: Mapping[str, str] | None, *, optimizer: bool
    ) -> LocalTrainingClient:
        state, base = self._core.open_state(path, base_model)
        policy = Policy(base, state.settings, self._core.limits)
        policy.load(state.folder, num_steps=state.num_steps if optimizer else None)
        number = self._core.count("training")
        metadata = state.user_metadata if user_metadata is None else user_metadata
        return LocalTrainingClient(self._core, policy, f"local-{number}", metadata)


class Switch:
    """``tinker.ServiceClient`` is the local engine until `undo`, or until the end of a ``with`` block.

    Attributes:
        service: The engine; all clients that are made meanwhile share it.
    """

    def __init__(self, service: LocalServiceClient) -> None:
        self.service = service
        self._before = tinker.ServiceClient

        class InstalledServiceClient(LocalServiceClient):
            """`LocalServiceClient` with the arguments of ``tinker.ServiceClient``; all of them share one engine."""

            def __init__(self, *args: object, base_url: str | None = None, **kwargs: object) -> None:
                # the other arguments (metadata, names, keys) say who asks a server
                if base_url is not None:
                    raise ValueError(
                        # not the address itself: it may hold a password
                        "base_url names a server, but viva.engine.install() put the local engine in its place. "
                        "Leave base_url out, or undo the install."
                    )
                self._core = service._core

        self._class = InstalledServiceClient
        cast(Any, tinker).ServiceClient = InstalledServiceClient

    def undo(self) -> None:
        """Put back what was there before; a second time it does nothing.

        Raises:
            RuntimeError: If something else was put in its place meanwhile.
        """
        if self._before is None:
            return
        if cast(Any, tinker).ServiceClient is not self._class:
            raise RuntimeError(
                "tinker.ServiceClient was replaced again after this install(); undo the later one first"
            )
        cast(Any, tinker).ServiceClient, self._before = self._before, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def install(service: LocalServiceClient | None = None, **options: Any) -> Switch:
    """Make ``tinker.ServiceClient`` the local engine, so that other programs' training loops run on it unchanged.

    Modules that took the class itself before (``from tinker import ServiceClient``) keep what they took.

    Args:
        service: The engine; by default a new one.
        **options: Of the new one, as `LocalServiceClient` takes them: ``state_dir`` for checkpoints, ``device``, ...

    Returns:
        What undoes it; also a context manager.

    Raises:
        ValueError: If both are given, or an option makes no sense.
    """
    if service is not None and options:
        raise ValueError(
            f"install() takes a service or options for a new one, not both; got {sorted(options)}"
        )
    return Switch(service or LocalServiceClient(**options))
