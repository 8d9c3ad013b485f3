"""The engine of a run: the embedded one, or a remote one with the same interface; and the end of its session.

SDKs up to tinker 0.22, which SkyRL's newest release needs, block until a client is made; newer ones answer at once with
a future of it. `make_service` gives both the newer form. From the first request on, the SDK tells a server every 10 s
that its session is alive, in a thread that goes on as long as the process: whoever opens a service client ends its
session, too, within `FAREWELL_S`. A server that does not hear of it ends the session minutes after the last sign.

The learning rate where the user gives none: models that tinker-cookbook knows get its ``hyperparam_utils.get_lr`` (only
where that needs no network). For a model in a local folder, the same shape of rule is applied to its ``config.json``:
``5e-4 * (2000 / hidden_size) ** e`` for LoRA, a tenth of it for full fine-tuning, with ``e`` = 0.781 for the Llama
family and 0.0775 for all others. Models with a ``hidden_size`` below 2000 get `NARROW_RATE`: the power law was
fitted to models of billions of parameters and overshoots for one of a few million.
"""

import asyncio
import logging
import os
import tempfile
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module, metadata
from inspect import getattr_static, signature
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, cast

import tinker
from packaging.requirements import Requirement

from viva.hub import hub_access, hub_problem, split_revision
from viva.model_files import read_object
from viva.run.secrets import KEY_VARIABLE, split_address, without_secrets
from viva.sdk import Ending, ServiceClient
from viva.training.remote import check_address, check_version, keep_keys_at_home, watched

NARROW_RATE = 2e-4
"""Learning rate of local models that are narrower than the rule's reference width.

Measured on SmolLM2-135M-Instruct alone, to which the rule would give 1.3e-3: at 1e-3 it learned less than half as much
(benchmarks/log.md).
"""

_BASE_RATE = 5e-4
_REFERENCE_WIDTH = 2000
_EXPONENTS = {"llama": 0.781}
_OTHER_EXPONENT = 0.0775
_FULL_SHARE = 0.1


def default_learning_rate(model_name: str, *, is_lora: bool = True, may_fetch: bool = False) -> float:
    """A sensible learning rate for a hub name or a local model folder.

    Without ``may_fetch`` no network is used; with it, the hub is asked for the model's ``config.json``.

    Raises:
        ValueError: If nothing is known about the model, or the hub does not give its ``config.json``.
    """
    folder_config = Path(model_name).expanduser() / "config.json"
    if folder_config.is_file():
        return _local_rate(folder_config, is_lora)
    rate = _cookbook_rate(split_revision(model_name)[0], is_lora)
    if rate is not None:
        return rate
    found = cached_config(model_name) or (_fetched_config(model_name) if may_fetch else None)
    if found is not None:
        return _local_rate(found, is_lora)
    raise ValueError(f"no learning rate is known for {model_name}; pass learning_rate=..., for example 1e-4")


def _local_rate(config_path: Path, is_lora: bool) -> float:
    config = read_object(config_path)
    nested: dict[str, Any] = config.get("text_config") or {}
    width = config.get("hidden_size") or nested.get("hidden_size")
    if not isinstance(width, int) or width < 1:
        raise ValueError(
            f"{config_path} has no hidden_size to derive a learning rate from; pass learning_rate=..."
        )
    exponent = _EXPONENTS.get(str(config.get("model_type", "")), _OTHER_EXPONENT)
    rule = _BASE_RATE * (_REFERENCE_WIDTH / width) ** exponent
    rate = rule if width >= _REFERENCE_WIDTH else NARROW_RATE
    return rate if is_lora else rate * _FULL_SHARE


def _cookbook_rate(model_name: str, is_lora: bool) -> float | None:
    from tinker_cookbook import hyperparam_utils
    from tinker_cookbook.exceptions import ConfigurationError

    try:
        # raises for models the cookbook has no sizes of; for those, get_lr would ask the network
        hyperparam_utils.get_lora_param_count(model_name)
        return hyperparam_utils.get_lr(model_name, is_lora=is_lora)
    except (ConfigurationError, NotImplementedError):
        return None


def cached_config(model_name: str) -> Path | None:
    """The ``config.json`` of a hub model that was loaded before; ``None`` if it was not. Uses no network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repository, revision = split_revision(model_name)
    try:
        found = try_to_load_from_cache(repository, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _fetched_config(model_name: str) -> Path | None:
    from huggingface_hub import hf_hub_download

    repository, revision = split_revision(model_name)
    try:
        with hub_access(repository):
            return Path(hf_hub_download(repository, "config.json", revision=revision))
    except (OSError, ValueError) as error:  # those of the hub are among them
        problem = hub_problem(error, name=model_name, option="model_name")
        if problem is None:  # nothing to read there, or no valid name
            return None
        raise ValueError(problem) from error


EngineChoice: TypeAlias = Literal["local", "remote"]

_NO_KEY = "tml-none"
"""The SDK wants a key, of this form; servers of one's own do not look at it."""


def choose_engine(engine: EngineChoice | None, *, base_url: str | None, model: str | None) -> EngineChoice:
    """The engine that is named, else the remote one if there is an address, or a key and a model from the hub.

    A model in a local folder stays here: hosted Tinker could not read it.
    """
    if engine is not None:
        return engine
    has_key = bool(os.environ.get(KEY_VARIABLE))
    is_from_hub = model is not None and not Path(model).is_dir()
    return "remote" if base_url is not None or (has_key and is_from_hub) else "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine of a run.

    ``remote`` is hosted Tinker (with the key in ``TINKER_API_KEY``) or, with a ``base_url``, any server that speaks its
    protocol. See `choose_engine` for what holds where nothing is said.
    """

    engine: EngineChoice = "local"
    base_url: str | None = None
    device: str | None = None
    """Local engine: ``cpu`` or ``cuda``; by default a GPU if there is one."""
    precision: str = "float32"

    def __post_init__(self) -> None:
        """Reject choices that contradict each other."""
        if self.engine not in ("local", "remote"):
            raise ValueError(f"engine must be local or remote; got {self.engine!r}")
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url must begin with http:// or https://; got {without_secrets(self.base_url)!r}"
            )
        if self.engine == "local" and self.base_url is not None:
            raise ValueError(
                f"base_url={without_secrets(self.base_url)} needs engine=remote; the local engine has no address"
            )
        if self.precision not in ("float32", "fast", "bfloat16"):
            raise ValueError(f"precision must be float32, fast or bfloat16; got {self.precision!r}")

    @property
    def server(self) -> str | None:
        """The server's name in messages; ``None`` without one."""
        if self.engine == "local":
            return None
        return "Tinker" if self.base_url is None else f"the server at {without_secrets(self.base_url)}"

    def watched(self) -> AbstractAsyncContextManager[None]:
        """Within this context, the current task is stopped when the engine's server is gone for good.

        Hosted Tinker is not watched: it comes back, and keeps its state.

        Raises:
            EngineLostError: When that is over, see `viva.training.remote.watched`.
        """
        return nullcontext() if self.base_url is None else watched(self.base_url)


_MADE_FOR = ("tinker", "tinker-cookbook")


def check_installed() -> None:
    """Refuse versions of the SDK and the cookbook for which Viva is not made.

    Raises:
        ValueError: With what to install.
    """
    try:
        needed = [Requirement(line) for line in metadata.requires("viva-rl") or ()]
    except metadata.PackageNotFoundError:  # run from its source
        return
    for each in needed:
        if each.name not in _MADE_FOR or each.marker is not None:
            continue
        found = metadata.version(each.name)
        if not each.specifier.contains(found, prereleases=True):
            raise ValueError(
                f"{each.name} {found} is installed, and this version of Viva is made for {each.name}{each.specifier}: "
                f"pip install '{each.name}{each.specifier}'"
            )


def make_service(
    config: EngineConfig, *, state_dir: Path, one_run: bool = False, num_policies: int = 1
) -> ServiceClient:
    """The engine's service client. The local engine saves under `state_dir` and opens no connection.

    With ``one_run``, training clients save by names of their own, which go on after a restart; adapters of several
    ``num_policies``, which talk by turns, share the local engine's batches.

    Raises:
        ValueError: If no server answers at the address, this SDK is too new for it, or `check_installed` refuses.
    """
    check_installed()
    if config.engine == "remote":
        keep_keys_at_home()
        if config.base_url is None:
            if key := os.environ.get(KEY_VARIABLE):  # else the SDK says that there is none
                hosted: Any = import_module("tinker._client").AsyncTinker(api_key=key)
                check_address(str(hosted.base_url), is_hosted=True)
            return awaitable_service(tinker.ServiceClient())
        check_address(config.base_url)
        check_version(config.base_url)
        key = os.environ.get(KEY_VARIABLE) or _NO_KEY
        address, headers = split_address(config.base_url)
        try:
            client = tinker.ServiceClient(base_url=address, api_key=key, **_header_options(headers))
            if "holder" in vars(type(client)):  # newer SDKs ask the server when this is first looked at
                _ = client.holder
        except (AttributeError, TypeError) as error:  # the SDK reads an answer that is not what it expects
            raise ValueError(
                f"{config.server} answers, but not as Tinker's protocol says ({error}); give the base_url of a server "
                "that speaks it"
            ) from error
        return awaitable_service(client)
    from viva.engine import EngineLimits, LocalServiceClient

    return LocalServiceClient(
        device=config.device,
        precision=config.precision,
        state_dir=state_dir,
        one_run=one_run,
        limits=EngineLimits(merged_models=num_policies + 1),
        shared_batch=num_policies > 1,
    )


def context_window(model: str) -> int | None:
    """Tokens that a model can hold, from the ``config.json`` of its folder or of what was loaded from the hub before.

    ``None`` if that is not known here.
    """
    folder_config = Path(model) / "config.json"
    path = folder_config if folder_config.is_file() else cached_config(model)
    if path is None:
        return None
    window = read_object(path).get("max_position_embeddings")
    return window if isinstance(window, int) else None


_BLOCKING = frozenset(
    {
        "create_lora_training_client",
        "create_sampling_client",
        "create_training_client_from_state",
        "create_training_client_from_state_with_optimizer",
        "forward_backward_custom",
        "save_weights_and_get_sampling_client",
    }
)


class _Awaitable:
    """A client whose blocking methods return coroutines; everything else is the client's own."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        if name not in _BLOCKING:
            return getattr(self._client, name)
        twin = getattr(self._client, f"{name}_async")

        async def method(*args: Any, **options: Any) -> Any:
            made = await twin(*args, **options)
            return _Awaitable(made) if isinstance(made, tinker.TrainingClient) else made

        return method


class _BlockingService(_Awaitable):
    """A service client of an SDK whose methods block."""

    async def close(self, status: Ending) -> None:
        """End the session. SDKs up to tinker 0.26 cannot tell the server, but they can stop the signs of life."""
        if hasattr(type(self._client), "close"):
            await self._client.close(status)
        else:
            self._client.holder.close()


def _header_options(headers: dict[str, str]) -> dict[str, Any]:
    """The option of a service client that sends headers with every request; nothing where there are none."""
    if not headers:
        return {}
    is_new = "default_headers_overrides" in signature(tinker.ServiceClient).parameters
    return {"default_headers_overrides" if is_new else "default_headers": headers}


def awaitable_service(service: tinker.ServiceClient) -> ServiceClient:
    """The service, or one that stands for it if its SDK blocks."""
    twin = getattr_static(type(service), "create_lora_training_client_async")
    is_new = hasattr(twin, "__deprecated__")
    return cast(ServiceClient, service if is_new else _BlockingService(service))


FAREWELL_S: dict[Ending, float] = {"success": 5.0, "errored": 5.0, "interrupted": 1.0}
"""Seconds that a server may take to hear of a session's end; who interrupts wants to be off."""

_log = logging.getLogger(__name__)


def ending_of(error: BaseException | None) -> Ending:
    """The ending of something that raised this."""
    if error is None:
        return "success"
    return "errored" if isinstance(error, Exception) else "interrupted"


async def end_session(service: ServiceClient, ending: Ending) -> None:
    """End a session: tell the server, and stop the signs of life whatever it answers, which changes nothing here."""
    try:
        async with asyncio.timeout(FAREWELL_S[ending]):
            await service.close(ending)
    except (tinker.TinkerError, TimeoutError, RuntimeError) as error:
        _log.info("the server did not take the end of a session: %s", without_secrets(repr(error)))


class Engines:
    """Service clients of a command, one for each engine; their sessions end with the context.

    Without a ``state_dir``, local engines are for sampling, which saves nothing.
    """

    def __init__(self, state_dir: Path | None = None) -> None:
        self._state_dir = state_dir or Path(tempfile.gettempdir())
        self._services: dict[EngineConfig, ServiceClient] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(end_session(each, ending_of(error)) for each in self._services.values()))

    def service(self, config: EngineConfig) -> ServiceClient:
        """The service client of an engine, opened when it is first asked for.

        Raises:
            ValueError: As `make_service`.
        """
        if config not in self._services:
            self._services[config] = make_service(config, state_dir=self._state_dir)
        return self._services[config]
