"""Samplers of clients that speak Tinker's protocol; they belong to the engine's thread."""

from collections import OrderedDict
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import tinker
from tinker import types
from tinker.types.sample_request import SampleRequest

from viva.engine import LocalSamplingClient, LocalServiceClient
from viva.serve.bodies import RequestError
from viva.serve.sampling import ServedPolicy
from viva.serve.tinker_store import BaseModelNames, Results, SavedWeights, Sessions, begun
from viva.serve.tinker_wire import write_samples

_MOST_SAMPLERS = 64
_MOST_POLICIES = 8
_MOST_SAMPLES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampler:
    client: LocalSamplingClient
    model_path: str | None


class Samplers:
    """Samplers by name, the ones used last, and saved weights that requests of OpenAI's interface name.

    Args:
        service: Of the local engine.
        base: The model that is served.
        sessions: Whose samplers they are.
        results: Where the samples go.
        weights: What was saved.
    """

    def __init__(
        self,
        service: LocalServiceClient,
        base: BaseModelNames,
        sessions: Sessions,
        results: Results,
        weights: SavedWeights,
    ) -> None:
        self._service = service
        self._base = base
        self._sessions = sessions
        self._results = results
        self._weights = weights
        self._samplers: OrderedDict[str, _Sampler] = OrderedDict()
        self._policies: OrderedDict[tuple[str, int, int], ServedPolicy] = OrderedDict()
        sessions.at_end(self._forget)

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """Open saved weights, or the base model as it is, for sampling.

        Raises:
            RequestError: If there are none at the path.
        """
        request = types.CreateSamplingSessionRequest.model_validate(body)
        sampler_id = f"{self._sessions.see(request.session_id)}:sample:{request.sampling_session_seq_id}"
        if sampler_id not in self._samplers:
            if request.base_model is not None:
                self._base.check(request.base_model)
            path = None if request.model_path is None else str(self._weights.folder(request.model_path))
            client = self._service.create_sampling_client(model_path=path, base_model=self._base.model)
            self.add(sampler_id, client, request.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def describe(self, sampler_id: str) -> dict[str, Any]:
        """Model and weights of a sampler."""
        sampler = self._find(sampler_id)
        path = {} if sampler.model_path is None else {"model_path": sampler.model_path}
        return {"sampler_id": sampler_id, "base_model": sampler.client.get_base_model(), **path}

    def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        """Begin to sample.

        Raises:
            RequestError: If there is no such sampler, or too much to do.
        """
        request = SampleRequest.model_validate(body)
        if request.sampling_session_id is None or request.seq_id is None:
            raise RequestError("sampling_session_id and seq_id must be given")
        sampler = self._find(request.sampling_session_id)
        num_samples = request.num_samples
        if not 1 <= num_samples <= _MOST_SAMPLES:
            raise RequestError(f"num_samples must be between 1 and {_MOST_SAMPLES}; got {num_samples}")
        name = f"{request.sampling_session_id}:{request.seq_id}"
        if not self._results.knows(name):
            self._results.check_room()
            self._results.add(name, begun(lambda: _draw(sampler.client, request)), write_samples)
        return {
            "request_id": name,
            "sample_sequence_ids": [f"{name}:{index}" for index in range(num_samples)],
        }

    def _find(self, sampler_id: str) -> _Sampler:
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            raise RequestError(
                f"there is no sampler {sampler_id[:200]!r}: its session is over, the server was restarted, or "
                f"{_MOST_SAMPLERS} others were used since. Save the weights and open them again",
                status=404,
            )
        self._sessions.see_owner(sampler_id)
        self._samplers.move_to_end(sampler_id)
        return sampler

    def add(self, sampler_id: str, client: LocalSamplingClient, model_path: str | None = None) -> None:
        """Keep a sampler, in place of the one that was not used for longest if there are too many."""
        self._samplers[sampler_id] = _Sampler(client=client, model_path=model_path)
        while len(self._samplers) > _MOST_SAMPLERS:
            self._samplers.popitem(last=False)

    def _forget(self, prefix: str) -> None:
        for name in [name for name in self._samplers if name.startswith(prefix)]:
            del self._samplers[name]

    async def saved_policy(self, path: str, like: ServedPolicy) -> ServedPolicy:
        """Saved weights, as requests of OpenAI's interface name them; read again when they were saved again.

        Raises:
            RequestError: If there are none at the path.
        """
        folder = self._weights.folder(path)
        found = folder.stat()
        key = (path, found.st_ino, found.st_mtime_ns)
        if key not in self._policies:
            client = self._service.create_sampling_client(model_path=str(folder), base_model=self._base.model)
            self._policies[key] = like.over(client)
            while len(self._policies) > _MOST_POLICIES:
                self._policies.popitem(last=False)
        self._policies.move_to_end(key)
        return self._policies[key]


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
