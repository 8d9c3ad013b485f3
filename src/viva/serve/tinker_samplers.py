"""Samplers of clients that speak Tinker's protocol; they belong to the engine's thread."""

from collections import OrderedDict
from dataclasses import dataclass

import tinker
from tinker import types
from tinker.types.sample_request import SampleRequest

from viva.engine import LocalSamplingClient
from viva.serve.bodies import JsonObject, RequestError
from viva.serve.sampling import ServedPolicy
from viva.serve.tinker_store import Results, ServedWeights, Sessions
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
        weights: What may be sampled from.
        sessions: Whose samplers they are.
        results: Where the samples go.
    """

    def __init__(self, weights: ServedWeights, sessions: Sessions, results: Results) -> None:
        self._weights = weights
        self._sessions = sessions
        self._results = results
        self._samplers: OrderedDict[str, _Sampler] = OrderedDict()
        self._policies: OrderedDict[tuple[str, int, int], ServedPolicy] = OrderedDict()

    def create(self, body: JsonObject) -> JsonObject:
        """Open saved weights, or the base model as it is, for sampling.

        Raises:
            RequestError: If there are none at the path.
        """
        request = types.CreateSamplingSessionRequest.model_validate(body)
        sampler_id = f"{self._sessions.see(request.session_id)}:sample:{request.sampling_session_seq_id}"
        if sampler_id not in self._samplers:
            if request.base_model is not None:
                self._weights.check_base(request.base_model)
            self.add(sampler_id, self._weights.sampler(request.model_path), request.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def describe(self, sampler_id: str) -> JsonObject:
        """Model and weights of a sampler."""
        sampler = self._find(sampler_id)
        path = {} if sampler.model_path is None else {"model_path": sampler.model_path}
        return {"sampler_id": sampler_id, "base_model": sampler.client.get_base_model(), **path}

    def sample(self, body: JsonObject) -> JsonObject:
        """Begin to sample.

        Raises:
            RequestError: If there is no such sampler, or too much to do.
        """
        request = SampleRequest.model_validate(body)
        if request.sampling_session_id is None or request.seq_id is None:
            raise RequestError("sampling_session_id and seq_id must be given")
        client = self._find(request.sampling_session_id).client
        num_samples = request.num_samples
        if not 1 <= num_samples <= _MOST_SAMPLES:
            raise RequestError(f"num_samples must be between 1 and {_MOST_SAMPLES}; got {num_samples}")
        name = f"{request.sampling_session_id}:{request.seq_id}"
        if not self._results.knows(name):
            self._results.add(name, lambda: _drawn(client, request))
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

    def forget(self, prefix: str) -> None:
        """Let go of all samplers whose names begin so."""
        for name in [name for name in self._samplers if name.startswith(prefix)]:
            del self._samplers[name]

    async def saved_policy(self, address: str, like: ServedPolicy) -> ServedPolicy:
        """Saved weights, as requests of OpenAI's interface name them; read again when they were saved again.

        Raises:
            RequestError: If there are none at the address.
        """
        found = self._weights.folder(address).stat()
        key = (address, found.st_ino, found.st_mtime_ns)
        if key not in self._policies:
            self._policies[key] = ServedPolicy(self._weights.sampler(address), like.renderer)
            while len(self._policies) > _MOST_POLICIES:
                self._policies.popitem(last=False)
        self._policies.move_to_end(key)
        return self._policies[key]


async def _drawn(client: LocalSamplingClient, request: SampleRequest) -> bytes:
    if request.record_stability_info:
        raise RequestError("the local engine records no stability information; leave it out")
    targets = request.target_prompt_logprobs
    response = await client.sample(
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
    return write_samples(response)
