"""State that a server keeps for clients of Tinker's protocol: sessions, results, weights that they may name, samplers.

All of it belongs to the engine's thread.
"""

import asyncio
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import tinker
from tinker import types
from tinker.types.sample_request import SampleRequest

from viva.engine import LocalSamplingClient, LocalServiceClient
from viva.engine.checkpoint import read_state
from viva.serve.bodies import JsonObject, RequestError
from viva.serve.sampling import ServedPolicy
from viva.serve.tinker_wire import write_samples
from viva.serve.transport import told_error

_MOST_SESSIONS = 64
_SILENCE_S = 300.0
"""A session that says nothing for so long is over; the SDK says something every 10 s."""


class Sessions:
    """Sessions by name. What belongs to one has a name that begins with the session's and a colon.

    Args:
        forget: Called at the end of every session, with what the names of its belongings begin with.
    """

    def __init__(self, forget: Callable[[str], None]) -> None:
        self._forget = forget
        self._last_seen: dict[str, float] = {}

    def create(self, _: JsonObject) -> JsonObject:
        """Begin a session.

        Raises:
            RequestError: If there are too many.
        """
        for name, last_seen in list(self._last_seen.items()):
            if time.monotonic() - last_seen > _SILENCE_S:
                self.end(name)
        if len(self._last_seen) >= _MOST_SESSIONS:
            raise RequestError(f"{_MOST_SESSIONS} sessions are open; close one first (ServiceClient.close)")
        name = uuid.uuid4().hex
        self._last_seen[name] = time.monotonic()
        return {"type": "create_session", "session_id": name}

    def heartbeat(self, body: JsonObject) -> JsonObject:
        """A sign of life of a session; errors as of `see`."""
        self.see(str(body.get("session_id")))
        return {"type": "session_heartbeat"}

    def see(self, name: str) -> str:
        """Note a sign of life; returns the name.

        Raises:
            RequestError: If there is no such session (410).
        """
        if name not in self._last_seen:
            raise RequestError(f"there is no session {name[:200]!r}; make a new ServiceClient", status=410)
        self._last_seen[name] = time.monotonic()
        return name

    def see_owner(self, belonging: str) -> None:
        """Note a sign of life of the session that something belongs to."""
        self.see(belonging.partition(":")[0])

    def end(self, name: str) -> JsonObject:
        """End a session with all that belongs to it; where there is none, it is over already."""
        if self._last_seen.pop(name, None) is not None:
            self._forget(f"{name}:")
        return {}


_MOST_OPEN = 4096
"""Requests at once that are unfinished, or whose results nobody has fetched."""
_MOST_FETCHED = 256
"""Results that are kept after they were fetched, for a client that lost the answer and asks again."""
_WAIT_S = 25.0
"""Wait of a question for a result; the SDK gives up after 45 s and asks again after an answer."""

Result = JsonObject | bytes
"""JSON, or bytes in the SDK's binary form."""


class Results:
    """Results by the names of their requests."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Task[Result]] = {}
        self._fetched: OrderedDict[str, asyncio.Task[Result]] = OrderedDict()

    def knows(self, name: str) -> bool:
        """Whether a request of this name was made before."""
        return name in self._open or name in self._fetched

    def add(self, name: str, begin: Callable[[], Awaitable[Result]]) -> None:
        """Begin the work of a request, and keep its result; errors of the work are results, too.

        Raises:
            RequestError: If there are too many requests (429).
        """
        if len(self._open) >= _MOST_OPEN:
            raise RequestError(
                f"{len(self._open)} requests are unfinished or not fetched, and no more are taken; try again in a "
                "moment",
                status=429,
            )
        self._open[name] = asyncio.ensure_future(_finished(begin))

    async def fetch(self, body: JsonObject) -> Result | None:
        """A request's result, or ``None`` if it is not there after a while.

        Raises:
            RequestError: If no such request was made, or its result was fetched long ago (410).
        """
        name = str(body.get("request_id"))
        task = self._open.get(name) or self._fetched.get(name)
        if task is None:
            raise RequestError(f"no request {name[:200]!r} is known; send it again", status=410)
        done, _ = await asyncio.wait({task}, timeout=_WAIT_S)
        if not done:
            return None
        if name in self._open:
            self._fetched[name] = self._open.pop(name)
            while len(self._fetched) > _MOST_FETCHED:
                self._fetched.popitem(last=False)
        return _failed(RequestError("the request was cancelled")) if task.cancelled() else task.result()

    def cancel(self, name: str) -> None:
        """Give up a request; what it was doing is stopped if it can be."""
        if task := self._open.pop(name, None):
            task.cancel()

    def forget(self, prefix: str) -> None:
        """Give up all requests whose names begin so."""
        for name in [name for name in self._open if name.startswith(prefix)]:
            self.cancel(name)
        for name in [name for name in self._fetched if name.startswith(prefix)]:
            del self._fetched[name]


async def _finished(begin: Callable[[], Awaitable[Result]]) -> Result:
    try:
        return await begin()
    except Exception as error:  # noqa: BLE001 - the engine's errors are results of the requests that they are of
        return _failed(told_error(error))


def _failed(error: RequestError) -> Result:
    category = "user" if error.status < 500 else "server"
    return {"error": str(error), "category": category}


_PATH = re.compile(r"tinker://(client-[0-9]{6,12})/(weights|sampler_weights)/([A-Za-z0-9_.-]{1,200})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWeights:
    """The only base model of a server, and what was saved in the folder of its service."""

    service: LocalServiceClient
    """Of the local engine; saves in `state_dir`."""
    model: str
    """Name or folder of the base model, as the engine knows it."""
    names: tuple[str, ...]
    """Further names that clients may give it."""
    state_dir: Path

    def check_base(self, name: str) -> None:
        """Refuse another base model.

        Raises:
            RequestError: If it is one (404).
        """
        known = (self.model, *self.names)
        if name not in known and Path(name).resolve() != Path(self.model).resolve():
            raise RequestError(
                f"model {name[:200]!r} is not served here; served: {', '.join(dict.fromkeys(known))}",
                status=404,
            )

    def folder(self, address: str) -> Path:
        """The folder of saved weights.

        Raises:
            RequestError: If the address is none, or nothing lies there.
        """
        match = _PATH.fullmatch(address)
        if match is None or set(match[3]) == {"."}:
            raise RequestError(
                "the path must be tinker://CLIENT/weights/NAME or tinker://CLIENT/sampler_weights/NAME, as saving "
                f"returned it; got {address[:200]!r}"
            )
        folder = self.state_dir.joinpath(*match.groups())
        if not folder.is_dir():
            raise RequestError(f"there are no saved weights at {address}", status=404)
        return folder

    def sampler(self, address: str | None) -> LocalSamplingClient:
        """A sampler of saved weights, or of the base model as it is."""
        path = None if address is None else str(self.folder(address))
        return self.service.create_sampling_client(model_path=path, base_model=self.model)

    def info(self, body: JsonObject) -> JsonObject:
        """Base model and adapter of saved weights."""
        state = read_state(str(self.folder(str(body.get("tinker_path")))))
        rank = state.settings.rank
        return {"base_model": state.base_model, "is_lora": rank > 0, "lora_rank": rank or None}

    async def delete(self, run: str, checkpoint: str) -> JsonObject:
        """Delete saved weights."""
        folder = self.folder(f"tinker://{run}/{checkpoint}")
        await self.service.create_rest_client().delete_checkpoint_from_tinker_path(str(folder))
        return {}


def address_of(folder: str) -> str:
    """The address of saved weights, for clients that do not see this disk."""
    return "tinker://" + "/".join(Path(folder).parts[-3:])


_MOST_SAMPLERS = 64
_MOST_POLICIES = 8
_MOST_SAMPLES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampler:
    client: LocalSamplingClient
    model_path: str | None


class Samplers:
    """Samplers by name, the ones used last, and saved weights that requests of OpenAI's interface name."""

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
            self._policies[key] = ServedPolicy(address, self._weights.sampler(address), like.renderer)
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
