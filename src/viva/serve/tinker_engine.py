"""Sessions, trained models and samplers of clients that speak Tinker's protocol; all of it in the engine's thread.

A request is answered with its name at once; its result is fetched by the name. A name follows from the request's place
(session, model, number), so that one that is sent again, since its answer was lost, is done once.
"""

import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tinker
from pydantic import BaseModel
from tinker import types
from tinker.types.create_model_request import CreateModelRequest
from tinker.types.load_weights_request import LoadWeightsRequest
from tinker.types.optim_step_request import OptimStepRequest
from tinker.types.sample_request import SampleRequest
from tinker.types.save_weights_for_sampler_request import SaveWeightsForSamplerRequest
from tinker.types.save_weights_request import SaveWeightsRequest

from viva.engine import LocalSamplingClient, LocalServiceClient, LocalTrainingClient
from viva.engine.checkpoint import read_state
from viva.serve.bodies import RequestError
from viva.serve.tinker_results import Result, Results, failing
from viva.serve.tinker_wire import Gradients, write_losses, write_samples
from viva.serve.transport import told_error

_MOST_RESULTS = 4096
_MOST_SESSIONS = 64
_MOST_MODELS = 16
_MOST_SAMPLERS = 64
_MOST_SAMPLES = 1024
_SILENCE_S = 300.0
"""A session that says nothing for so long is over; the SDK says something every 10 s."""
_PATH = re.compile(r"tinker://(client-[0-9]{6,12})/(weights|sampler_weights)/([A-Za-z0-9_.-]{1,200})")


RequestT = TypeVar("RequestT", bound=BaseModel)


@dataclass(kw_only=True)
class _TrainedModel:
    client: LocalTrainingClient
    next_seq: int = 1
    """Number of the request that comes next; they are done in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampler:
    client: LocalSamplingClient
    model_path: str | None


class TinkerEngine:
    """The engine as clients of Tinker's protocol know it.

    Args:
        service: Of the local engine, with a ``state_dir``.
        model: Name or folder of the only base model that is trained and sampled here.
        names: Further names that clients may give it.
        state_dir: The service's.
    """

    def __init__(
        self, service: LocalServiceClient, *, model: str, names: tuple[str, ...], state_dir: Path
    ) -> None:
        self._service = service
        self._model = model
        self._names = names
        self._state_dir = state_dir
        self._results = Results(_MOST_RESULTS)
        self._sessions: dict[str, float] = {}
        self._models: dict[str, _TrainedModel] = {}
        self._samplers: OrderedDict[str, _Sampler] = OrderedDict()

    # sessions

    def create_session(self, _: dict[str, Any]) -> dict[str, Any]:
        """Begin a session.

        Raises:
            RequestError: If there are too many.
        """
        for name, last_seen in list(self._sessions.items()):
            if time.monotonic() - last_seen > _SILENCE_S:
                self.finish_session(name)
        if len(self._sessions) >= _MOST_SESSIONS:
            raise RequestError(f"{_MOST_SESSIONS} sessions are open; close one first (ServiceClient.close)")
        name = uuid.uuid4().hex
        self._sessions[name] = time.monotonic()
        return {"type": "create_session", "session_id": name}

    def heartbeat(self, body: dict[str, Any]) -> dict[str, Any]:
        """A sign of life of a session.

        Raises:
            RequestError: If there is none (410).
        """
        self._see(str(body.get("session_id")))
        return {"type": "session_heartbeat"}

    def finish_session(self, name: str) -> None:
        """End a session with all that belongs to it."""
        self._sessions.pop(name, None)
        prefix = f"{name}:"
        for models in (self._models, self._samplers):
            for each in [each for each in models if each.startswith(prefix)]:
                del models[each]
        self._results.forget(prefix)

    def _see(self, session: str) -> str:
        if session not in self._sessions:
            raise RequestError(f"there is no session {session[:200]!r}; make a new ServiceClient", status=410)
        self._sessions[session] = time.monotonic()
        return session

    # models

    def create_model(self, body: dict[str, Any]) -> dict[str, Any]:
        """Make an adapter to train.

        Raises:
            RequestError: If the engine cannot, or has too many.
        """
        request = _read(CreateModelRequest, body)
        model_id = f"{self._see(request.session_id)}:train:{request.model_seq_id}"
        name = f"{model_id}:0"
        if not self._results.knows(name):
            self._check_base(request.base_model)
            _check_adam(request.optimizer_config)
            lora = request.lora_config or types.LoraConfig(rank=32)
            self._add_model(
                model_id,
                lambda: self._service.create_lora_training_client(
                    self._model,
                    rank=lora.rank,
                    seed=lora.seed,
                    train_mlp=lora.train_mlp,
                    train_attn=lora.train_attn,
                    train_unembed=lora.train_unembed,
                    user_metadata=request.user_metadata,
                ),
            )
            self._results.add(name, _at_once({"model_id": model_id, "type": "create_model"}), _as_it_is)
        return {"request_id": name, "model_id": model_id}

    def load_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        """Load saved weights, into a model or as a new one.

        Raises:
            RequestError: If there are none at the path.
        """
        request = _read(LoadWeightsRequest, body)
        path = self._folder(request.path)
        if request.session_id is None:
            return self._train(
                request.model_id,
                request.seq_id,
                lambda client: (client.load_state_with_optimizer if request.optimizer else client.load_state)(
                    str(path)
                ),
                lambda _: {"type": "load_weights", "path": request.path, "model_id": request.model_id},
            )
        model_id = f"{self._see(request.session_id)}:train:{request.model_seq_id}"
        name = f"{model_id}:0"
        if not self._results.knows(name):
            if request.base_model is not None:
                self._check_base(request.base_model)
            if request.optimizer_config is not None:
                _check_adam(request.optimizer_config)
            open_it = (
                self._service.create_training_client_from_state_with_optimizer
                if request.optimizer
                else self._service.create_training_client_from_state
            )
            self._add_model(
                model_id,
                lambda: open_it(str(path), base_model=self._model, user_metadata=request.user_metadata),
            )
            value = {"type": "load_weights", "path": request.path, "model_id": model_id}
            self._results.add(name, _at_once(value), _as_it_is)
        return {"request_id": name, "model_id": model_id}

    def get_info(self, body: dict[str, Any]) -> dict[str, Any]:
        """What is known of a model."""
        model_id = str(body.get("model_id"))
        info = self._model_of(model_id).client.get_info()
        return info.model_dump(mode="json") | {"model_id": model_id}

    def forward_backward(self, request: Gradients) -> dict[str, Any]:
        """Compute losses and, unless the request is for them alone, add up gradients."""

        def compute(client: LocalTrainingClient) -> Awaitable[tinker.ForwardBackwardOutput]:
            method = client.forward if request.forward_only else client.forward_backward
            return method(request.data(), request.loss_fn, request.config)

        return self._train(request.model_id, request.seq_id, compute, write_losses)

    def optim_step(self, body: dict[str, Any]) -> dict[str, Any]:
        """Make a step."""
        request = _read(OptimStepRequest, body)
        params = request.optim_params

        def step(client: LocalTrainingClient) -> Awaitable[tinker.OptimStepResponse]:
            if not isinstance(params, tinker.AdamParams):
                raise RequestError(f"the local engine's optimiser is AdamW; got settings of {params.type!r}")
            return client.optim_step(params)

        return self._train(request.model_id, request.seq_id, step, _dumped)

    def save_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        """Save weights and optimiser."""
        request = _read(SaveWeightsRequest, body)
        return self._train(
            request.model_id,
            request.seq_id,
            lambda client: client.save_state(
                _given(request.path), overwrite=request.overwrite, user_metadata=request.user_metadata
            ),
            lambda saved: {"type": "save_weights", "path": _address(saved.path)},
        )

    def save_weights_for_sampler(self, body: dict[str, Any]) -> dict[str, Any]:
        """Save weights to sample from, or keep a snapshot of them for this session."""
        request = _read(SaveWeightsForSamplerRequest, body)
        if request.path is not None:
            return self._train(
                request.model_id,
                request.seq_id,
                lambda client: client.save_weights_for_sampler(
                    _given(request.path), user_metadata=request.user_metadata
                ),
                lambda saved: {"type": "save_weights_for_sampler", "path": _address(saved.path)},
            )
        sampler_id = f"{request.model_id.partition(':')[0]}:sample:{request.sampling_session_seq_id}"

        def keep(client: LocalTrainingClient) -> Awaitable[LocalSamplingClient]:
            if request.kind != "snapshot":
                raise RequestError(f"samplers are snapshots here (kind='snapshot'); got {request.kind!r}")
            sampler = client.save_weights_and_get_sampling_client()
            self._add_sampler(sampler_id, _Sampler(client=sampler, model_path=None))
            return sampler

        value = {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}
        return self._train(request.model_id, request.seq_id, keep, lambda _: value)

    def _train(
        self,
        model_id: str | None,
        seq_id: int | None,
        begin: Callable[[LocalTrainingClient], Awaitable[Any]],
        write: Callable[[Any], dict[str, Any] | bytes],
    ) -> dict[str, Any]:
        """Begin an operation of a model in its turn.

        Raises:
            RequestError: If there is no such model, or it is another one's turn (409, 410).
        """
        model = self._model_of(model_id)
        seq_id = model.next_seq if seq_id is None else seq_id
        name = f"{model_id}:{seq_id}"
        if not self._results.knows(name):
            if seq_id != model.next_seq:
                raise RequestError(
                    f"request {seq_id} of this model is out of turn; the next is {model.next_seq}",
                    status=409 if seq_id > model.next_seq else 410,
                )
            self._results.check_room()
            model.next_seq += 1
            self._results.add(name, _begun(lambda: begin(model.client)), write)
        return {"request_id": name, "model_id": model_id}

    def _model_of(self, model_id: str | None) -> _TrainedModel:
        if model_id is None or model_id not in self._models:
            raise RequestError(
                f"there is no model {str(model_id)[:200]!r}; its session is over, or the server was restarted. Make a "
                "training client from a saved state",
                status=404,
            )
        self._see(model_id.partition(":")[0])
        return self._models[model_id]

    def _add_model(self, model_id: str, make: Callable[[], LocalTrainingClient]) -> None:
        if len(self._models) >= _MOST_MODELS:
            raise RequestError(
                f"{_MOST_MODELS} adapters are being trained here; close a session first (ServiceClient.close)"
            )
        self._models[model_id] = _TrainedModel(client=make())

    def _check_base(self, name: str) -> None:
        known = (self._model, *self._names)
        if name not in known and Path(name).resolve() != Path(self._model).resolve():
            raise RequestError(
                f"model {name[:200]!r} is not served here; served: {', '.join(dict.fromkeys(known))}",
                status=404,
            )

    # samplers

    def create_sampling_session(self, body: dict[str, Any]) -> dict[str, Any]:
        """Open saved weights, or the base model as it is, for sampling.

        Raises:
            RequestError: If there are none at the path.
        """
        request = _read(types.CreateSamplingSessionRequest, body)
        sampler_id = f"{self._see(request.session_id)}:sample:{request.sampling_session_seq_id}"
        if sampler_id not in self._samplers:
            if request.base_model is not None:
                self._check_base(request.base_model)
            path = None if request.model_path is None else str(self._folder(request.model_path))
            client = self._service.create_sampling_client(model_path=path, base_model=self._model)
            self._add_sampler(sampler_id, _Sampler(client=client, model_path=request.model_path))
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def sampler(self, sampler_id: str) -> dict[str, Any]:
        """What is known of a sampler."""
        sampler = self._sampler(sampler_id)
        path = {} if sampler.model_path is None else {"model_path": sampler.model_path}
        return {"sampler_id": sampler_id, "base_model": sampler.client.get_base_model(), **path}

    def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        """Begin to sample.

        Raises:
            RequestError: If there is no such sampler, or too much to do.
        """
        request = _read(SampleRequest, body)
        if request.sampling_session_id is None or request.seq_id is None:
            raise RequestError("sampling_session_id and seq_id must be given")
        sampler = self._sampler(request.sampling_session_id)
        num_samples = request.num_samples
        if not 1 <= num_samples <= _MOST_SAMPLES:
            raise RequestError(f"num_samples must be between 1 and {_MOST_SAMPLES}; got {num_samples}")
        name = f"{request.sampling_session_id}:{request.seq_id}"
        if not self._results.knows(name):
            self._results.check_room()
            self._results.add(name, _begun(lambda: _draw(sampler.client, request)), write_samples)
        return {
            "request_id": name,
            "sample_sequence_ids": [f"{name}:{index}" for index in range(num_samples)],
        }

    def _sampler(self, sampler_id: str) -> _Sampler:
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            raise RequestError(
                f"there is no sampler {sampler_id[:200]!r}: its session is over, the server was restarted, or "
                f"{_MOST_SAMPLERS} others were used since. Save the weights and open them again",
                status=404,
            )
        self._see(sampler_id.partition(":")[0])
        self._samplers.move_to_end(sampler_id)
        return sampler

    def _add_sampler(self, sampler_id: str, sampler: _Sampler) -> None:
        self._samplers[sampler_id] = sampler
        while len(self._samplers) > _MOST_SAMPLERS:
            self._samplers.popitem(last=False)

    # results and checkpoints

    async def result(self, body: dict[str, Any], wait_s: float) -> Result | None:
        """A request's result, or ``None`` if it is not there after a while."""
        return await self._results.fetch(str(body.get("request_id")), wait_s)

    def cancel(self, body: dict[str, Any]) -> dict[str, Any]:
        """Give up a request for samples; a training request is carried out, since later ones build on it."""
        name = str(body.get("request_id"))
        if ":sample:" in name:
            self._results.cancel(name)
        return {}

    def weights_info(self, body: dict[str, Any]) -> dict[str, Any]:
        """What is known of saved weights."""
        state = read_state(str(self._folder(str(body.get("tinker_path")))))
        rank = state.settings.rank
        return {"base_model": state.base_model, "is_lora": rank > 0, "lora_rank": rank or None}

    async def delete_checkpoint(self, run: str, checkpoint: str) -> None:
        """Delete saved weights."""
        folder = self._folder(f"tinker://{run}/{checkpoint}")
        await self._service.create_rest_client().delete_checkpoint_from_tinker_path(str(folder))

    def capabilities(self) -> dict[str, Any]:
        """The model that is served."""
        return self._service.get_server_capabilities().model_dump(mode="json")

    def _folder(self, path: str) -> Path:
        match = _PATH.fullmatch(path)
        if match is None or set(match[3]) == {"."}:
            raise RequestError(
                f"the path must be tinker://CLIENT/weights/NAME or tinker://CLIENT/sampler_weights/NAME, as saving "
                f"returned it; got {path[:200]!r}"
            )
        folder = self._state_dir.joinpath(*match.groups())
        if not folder.is_dir():
            raise RequestError(f"there are no saved weights at {path}", status=404)
        return folder


def _read(kind: type[RequestT], body: dict[str, Any]) -> RequestT:
    return kind.model_validate(body)


def _address(folder: str) -> str:
    """The address of saved weights, for clients that do not see this disk."""
    return "tinker://" + "/".join(Path(folder).parts[-3:])


def _given(name: str | None) -> str:
    if name is None:
        raise RequestError("path must name what is saved")
    return name


def _check_adam(optimizer: types.OptimizerConfig) -> None:
    if optimizer.type != "adamw":
        raise RequestError(f"the local engine's optimiser is adamw; got {optimizer.type!r}")


def _draw(client: LocalSamplingClient, request: SampleRequest) -> Awaitable[tinker.SampleResponse]:
    if request.record_stability_info:
        raise RequestError("the local engine records no stability information; leave it out")
    targets = request.target_prompt_logprobs
    return client.sample(
        request.prompt,
        request.num_samples,
        request.sampling_params,
        include_prompt_logprobs=bool(request.prompt_logprobs),
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        target_prompt_logprobs=None if targets is None else tinker.TensorData(**targets.model_dump()),
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
    )


def _begun(begin: Callable[[], Awaitable[Any]]) -> Awaitable[Any]:
    """Work, or the refusal to begin it as its result."""
    try:
        return begin()
    except (ValueError, TypeError, RuntimeError) as error:
        return failing(told_error(error))


async def _at_once(value: dict[str, Any]) -> dict[str, Any]:
    return value


def _as_it_is(value: dict[str, Any]) -> dict[str, Any]:
    return value


def _dumped(value: BaseModel) -> dict[str, Any]:
    return value.model_dump(mode="json")
