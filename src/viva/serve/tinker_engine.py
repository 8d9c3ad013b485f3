"""Models that clients of Tinker's protocol train; all of it in the engine's thread.

A request is answered with its name at once; its result is fetched by the name. A name follows from the request's place
(session, model, number), so that one that is sent again, since its answer was lost, is done once.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as wire
from tinker.types.create_model_request import CreateModelRequest
from tinker.types.load_weights_request import LoadWeightsRequest
from tinker.types.optim_step_request import OptimStepRequest
from tinker.types.save_weights_for_sampler_request import SaveWeightsForSamplerRequest
from tinker.types.save_weights_request import SaveWeightsRequest

from viva.engine import LocalTrainingClient
from viva.serve.bodies import JsonObject, RequestError
from viva.serve.tinker_store import Result, Results, Samplers, ServedWeights, Sessions, address_of
from viva.serve.tinker_wire import loss_config, read_data, write_losses

_MOST_MODELS = 16


@dataclass(kw_only=True)
class _TrainedModel:
    client: LocalTrainingClient
    next_seq: int = 1
    """Number of the request that comes next; they are done in this order."""


class TinkerEngine:
    """The engine as clients of Tinker's protocol know it."""

    def __init__(self, weights: ServedWeights) -> None:
        self.results = Results()
        self._models: dict[str, _TrainedModel] = {}
        self.sessions = Sessions(self._forget)
        self.weights = weights
        self.samplers = Samplers(weights, self.sessions, self.results)

    def create_model(self, body: JsonObject) -> JsonObject:
        """Make an adapter to train.

        Raises:
            RequestError: If the engine cannot, or has too many.
        """
        request = CreateModelRequest.model_validate(body)
        lora = request.lora_config or types.LoraConfig(rank=32)

        def make() -> LocalTrainingClient:
            self.weights.check_base(request.base_model)
            _check_adam(request.optimizer_config.type)
            return self.weights.service.create_lora_training_client(
                self.weights.model,
                rank=lora.rank,
                seed=lora.seed,
                train_mlp=lora.train_mlp,
                train_attn=lora.train_attn,
                train_unembed=lora.train_unembed,
                user_metadata=request.user_metadata,
            )

        return self._add_model(request.session_id, request.model_seq_id, make, {"type": "create_model"})

    def load_weights(self, body: JsonObject) -> JsonObject:
        """Load saved weights, into a model or as a new one.

        Raises:
            RequestError: If there are none at the path.
        """
        request = LoadWeightsRequest.model_validate(body)
        path = str(self.weights.folder(request.path))
        value: JsonObject = {"type": "load_weights", "path": request.path}
        if request.session_id is None:

            async def load(client: LocalTrainingClient) -> Result:
                await (client.load_state_with_optimizer if request.optimizer else client.load_state)(path)
                return value | {"model_id": request.model_id}

            return self._train(request.model_id, request.seq_id, load)

        def make() -> LocalTrainingClient:
            if request.base_model is not None:
                self.weights.check_base(request.base_model)
            if request.optimizer_config is not None:
                _check_adam(request.optimizer_config.type)
            service = self.weights.service
            open_it = (
                service.create_training_client_from_state_with_optimizer
                if request.optimizer
                else service.create_training_client_from_state
            )
            return open_it(path, base_model=self.weights.model, user_metadata=request.user_metadata)

        return self._add_model(request.session_id, request.model_seq_id, make, value)

    def get_info(self, body: JsonObject) -> JsonObject:
        """A model's facts, as the SDK's ``GetInfoResponse``."""
        model_id = str(body.get("model_id"))
        info: JsonObject = self._model_of(model_id).client.get_info().model_dump(mode="json")
        return info | {"model_id": model_id}

    def forward_backward(self, request: wire.ForwardBackwardRequest) -> JsonObject:
        """Compute losses and, unless the request is for them alone, add up gradients."""

        async def compute(client: LocalTrainingClient) -> Result:
            method = client.forward if request.forward_only else client.forward_backward
            return write_losses(await method(read_data(request), request.loss_fn, loss_config(request)))

        return self._train(request.model_id, request.seq_id, compute)

    def optim_step(self, body: JsonObject) -> JsonObject:
        """Make a step."""
        request = OptimStepRequest.model_validate(body)
        params = request.optim_params

        async def step(client: LocalTrainingClient) -> Result:
            if not isinstance(params, tinker.AdamParams):
                raise RequestError(f"the local engine's optimiser is AdamW; got settings of {params.type!r}")
            return (await client.optim_step(params)).model_dump(mode="json")

        return self._train(request.model_id, request.seq_id, step)

    def save_weights(self, body: JsonObject) -> JsonObject:
        """Save weights and optimiser."""
        request = SaveWeightsRequest.model_validate(body)

        async def save(client: LocalTrainingClient) -> Result:
            if request.path is None:
                raise RequestError("path must name what is saved")
            saved = await client.save_state(
                request.path, overwrite=request.overwrite, user_metadata=request.user_metadata
            )
            return {"type": "save_weights", "path": address_of(saved.path)}

        return self._train(request.model_id, request.seq_id, save)

    def save_weights_for_sampler(self, body: JsonObject) -> JsonObject:
        """Save weights to sample from, or keep a snapshot of them for this session."""
        request = SaveWeightsForSamplerRequest.model_validate(body)

        async def save(client: LocalTrainingClient) -> Result:
            if request.path is not None:
                saved = await client.save_weights_for_sampler(
                    request.path, user_metadata=request.user_metadata
                )
                return {"type": "save_weights_for_sampler", "path": address_of(saved.path)}
            if request.kind != "snapshot":
                raise RequestError(f"samplers are snapshots here (kind='snapshot'); got {request.kind!r}")
            sampler_id = f"{request.model_id.partition(':')[0]}:sample:{request.sampling_session_seq_id}"
            self.samplers.add(sampler_id, await client.save_weights_and_get_sampling_client())
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return self._train(request.model_id, request.seq_id, save)

    def _train(
        self,
        model_id: str | None,
        seq_id: int | None,
        work: Callable[[LocalTrainingClient], Awaitable[Result]],
    ) -> JsonObject:
        """Begin an operation of a model in its turn.

        Raises:
            RequestError: If there is no such model, or it is another one's turn (409, 410).
        """
        model = self._model_of(model_id)
        seq_id = model.next_seq if seq_id is None else seq_id
        name = f"{model_id}:{seq_id}"
        if not self.results.knows(name):
            if seq_id != model.next_seq:
                raise RequestError(
                    f"request {seq_id} of this model is out of turn; the next is {model.next_seq}",
                    status=409 if seq_id > model.next_seq else 410,
                )
            self.results.add(name, lambda: work(model.client))
            model.next_seq += 1
        return {"request_id": name, "model_id": model_id}

    def _model_of(self, model_id: str | None) -> _TrainedModel:
        if model_id is None or model_id not in self._models:
            raise RequestError(
                f"there is no model {str(model_id)[:200]!r}; its session is over, or the server was restarted. Make a "
                "training client from a saved state",
                status=404,
            )
        self.sessions.see_owner(model_id)
        return self._models[model_id]

    def _forget(self, prefix: str) -> None:
        """Let go of all that belongs to a session."""
        self.results.forget(prefix)
        for name in [name for name in self._models if name.startswith(prefix)]:
            del self._models[name]
        self.samplers.forget(prefix)

    def _add_model(
        self,
        session_id: str,
        model_seq_id: int | None,
        make: Callable[[], LocalTrainingClient],
        value: JsonObject,
    ) -> JsonObject:
        """Make a model, unless this request made it before; `value` is the result.

        Raises:
            RequestError: If there are too many.
        """
        model_id = f"{self.sessions.see(session_id)}:train:{model_seq_id}"
        name = f"{model_id}:0"

        async def made() -> Result:
            return value | {"model_id": model_id}

        if not self.results.knows(name):
            if len(self._models) >= _MOST_MODELS:
                raise RequestError(
                    f"{_MOST_MODELS} adapters are being trained here; close a session first (ServiceClient.close)"
                )
            self._models[model_id] = _TrainedModel(client=make())
            self.results.add(name, made)
        return {"request_id": name, "model_id": model_id}

    def cancel(self, body: JsonObject) -> JsonObject:
        """Give up a request for samples; a training request is carried out, since later ones build on it."""
        name = str(body.get("request_id"))
        if ":sample:" in name:
            self.results.cancel(name)
        return {}

    def capabilities(self) -> JsonObject:
        """The model that is served."""
        return self.weights.service.get_server_capabilities().model_dump(mode="json")


def _check_adam(optimizer: str) -> None:
    if optimizer != "adamw":
        raise RequestError(f"the local engine's optimiser is adamw; got {optimizer!r}")
