"""The journal: what the engine has answered in the steps that no checkpoint covers yet, so that it is not asked again.

Between the loop and the sampling clients of a step stands a `JournaledClient`. It keeps every answer (turns, judges'
comparisons, experts' samples, evaluations) in ``journal/<step>.jsonl``, found by a digest of what was asked: the
version of the policy, the prompt, the settings with their seed, and how many equal calls there were before. A run that
goes on from a checkpoint does the steps after it again, and takes their answers from there. A checkpoint ends the
journal of the steps that it covers. A line that is torn or damaged is as if it had never been written: its call is made
again. An answer that nobody can use (a reply without a token, or with a logprob that is no number) is not kept: its
cause may be mended before the run goes on.

Its modes, by what an engine's answer depends on:

``turns``
    The call alone, as with servers. Every answer is kept as it comes; those that come while others are being written go
    to the disk together, with one fsync.
``steps``
    In its last bits, also what else the engine decodes: the local one. Answers of the journal would change fresh ones
    beside them, so a step is taken from the journal as a whole or sampled again, with the same result to the bit. Its
    file is written in one piece, and counts only under the versions and settings under which it was written.
``off``
    Such an engine while it samples and trains at the same time: no step is whole.
"""

import asyncio
import base64
import functools
import hashlib
import inspect
import json
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import tinker
from pydantic import BaseModel

from viva.judging.judge import SamplingClient, response_of
from viva.run.files import naming, write_atomic
from viva.sdk import answers_together, make_topk

JournalMode: TypeAlias = Literal["turns", "steps", "off"]

_PLAIN = (type(None), bool, int, float, str)


class Journal:
    """The journal of a run folder; `environment` gives what a ``steps`` engine depends on beside the run's options."""

    def __init__(self, folder: Path, *, environment: Callable[[], Mapping[str, str]]) -> None:
        self._folder = folder
        self._environment = environment
        self._open: dict[str, _Answers] = {}
        self.now: _Answers | None = None
        """The answers of the part that goes on."""

    def client(self, client: SamplingClient, version: int | str) -> "JournaledClient":
        """A client whose calls during a `part` go through the journal; `version` distinguishes its weights."""
        return JournaledClient(client, version, self)

    @asynccontextmanager
    async def part(
        self, name: str, mode: JournalMode, *, is_last: bool, report: Callable[[str], None]
    ) -> AsyncGenerator[None]:
        """A part of a step, at whose end no call of it is under way. Parts do not overlap.

        The name is that of the step's file, which begins with the step's number. `report` gets a message if answers of
        a step that `is_last` ended came from the journal.

        Raises:
            OSError: If the journal cannot be written.
        """
        if mode == "off":
            yield
            return
        answers, path = self._open.pop(name, None), self._folder / f"{name}.jsonl"
        if answers is None:
            answers = _Turns(path) if mode == "turns" else _Step(path, self._environment())
        self.now = answers
        try:
            yield
        except BaseException:
            self.now = None
            await answers.close(is_whole=False)
            raise
        self.now = None
        if not is_last:
            self._open[name] = answers
            return
        await answers.close(is_whole=True)
        if answers.num_taken:
            report(answers.summary())

    async def close(self) -> None:
        """Close it: steps that were begun end early."""
        while self._open:
            await self._open.popitem()[1].close(is_whole=False)

    def drop_before(self, step: int | None) -> None:
        """Forget the steps before one, since a checkpoint covers them; ``None`` forgets all. Nothing may be open."""
        if step is None:
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        for path in sorted(self._folder.glob("*.jsonl*")):
            number = path.name.partition(".")[0].partition("-")[0]
            # others are what was left of a file that was not written to its end
            if not number.isdecimal() or int(number) < step:
                path.unlink()


class JournaledClient:
    """A sampling client that asks the journal first. Everything but ``sample`` is the client's own."""

    def __init__(self, client: SamplingClient, version: int | str, journal: Journal) -> None:
        self._client = client
        self.answers_together = answers_together(client)
        signature = inspect.signature(client.sample)

        # the signature stays that of the client: judges look there for what it can return
        @functools.wraps(client.sample)
        def sample(*args: Any, **options: Any) -> Any:
            answers = journal.now
            if answers is None:
                return client.sample(*args, **options)
            key = answers.key(version, signature.bind(*args, **options).arguments)
            stored = answers.take(key)
            if stored is None:
                return _RecordingFuture(client.sample(*args, **options), answers, key)
            return _CachedResponse(decode_answer(stored))

        self.sample = sample

    async def sample_async(self, *args: Any, **options: Any) -> tinker.SampleResponse:
        """``sample``, awaited: for code written for older SDKs."""
        return await self.sample(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class _Answers(ABC):
    """The answers of one step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_taken = 0
        self.num_lacking = 0
        """Calls that were made although the step was to be taken from the journal as a whole."""
        self._stored: dict[str, Mapping[str, Any]] = {}
        """Answers by the places of their calls."""
        self._calls: Counter[str] = Counter()

    def key(self, version: int | str, arguments: Mapping[str, object]) -> str | None:
        """The place of a call that is made now."""
        call = call_key(version, arguments)
        if call is None:
            return None
        self._calls[call] += 1
        return f"{call}-{self._calls[call]}"

    def take(self, key: str | None) -> Mapping[str, Any] | None:
        """The stored answer to a call, if there is one."""
        answer = None if key is None else self._stored.get(key)
        self.num_taken += answer is not None
        return answer

    def summary(self) -> str:
        """A message of how much was taken."""
        lacking = f"; it lacks {self.num_lacking}, which are asked for again" if self.num_lacking else ""
        return f"{self.num_taken} answers are taken from the journal: they were sampled before{lacking}"

    @abstractmethod
    def keep(self, key: str, response: tinker.SampleResponse) -> None:
        """Keep the answer to a call."""

    @abstractmethod
    async def close(self, *, is_whole: bool) -> None:
        """The step has no further part; `is_whole` unless something ended it early."""

    def _read(self) -> list[dict[str, object]]:
        """Read what is stored: the answers, and whatever else there is, which is returned."""
        with naming(self.path):
            content = self.path.read_bytes() if self.path.exists() else b""
        bodies = [body for line in content.splitlines(keepends=True) if (body := read_line(line)) is not None]
        self._stored = {body["key"]: body["answer"] for body in bodies if "key" in body}
        return [body for body in bodies if "key" not in body]


class _Turns(_Answers):
    """Every answer counts by itself."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not path.exists():
            write_atomic(path, "")
        self._read()
        self._file = path.open("r+b", buffering=0)
        with naming(path):
            self._file.truncate(path.read_bytes().rfind(b"\n") + 1)  # without a line that was torn
        self._file.seek(0, os.SEEK_END)
        self._waiting: list[bytes] = []
        self._writing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def keep(self, key: str, response: tinker.SampleResponse) -> None:
        """Write it soon."""
        answer = encode_answer(response)
        if answer is None:
            return
        line = make_line({"key": key, "answer": answer})
        if asyncio._get_running_loop() is self._loop:
            self._add(line)
        else:  # whoever waits with `result` does so in another thread
            self._loop.call_soon_threadsafe(self._add, line)

    def _add(self, line: bytes) -> None:
        self._waiting.append(line)
        if self._writing is None or self._writing.done():
            self._raise_failure()
            self._writing = self._loop.create_task(self._write())

    async def close(self, *, is_whole: bool) -> None:
        """Wait until all is on the disk."""
        try:
            while self._writing is not None and not self._writing.done():
                await asyncio.wait([self._writing])
            self._raise_failure()
        finally:
            self._file.close()

    async def _write(self) -> None:
        while self._waiting:
            lines, self._waiting = self._waiting, []
            await asyncio.to_thread(self._commit, b"".join(lines))

    def _commit(self, data: bytes) -> None:
        with naming(self.path):
            while data:  # a disk may take less than it is given
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())

    def _raise_failure(self) -> None:
        if self._writing is not None:
            self._writing.result()


class _Step(_Answers):
    """All answers count, or none."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        super().__init__(path)
        self._environment = dict(environment)
        self._lines: dict[str, bytes] = {}
        self._num_asked = 0
        ends = self._read()
        self._is_stored = ends == [self._end(len(self._stored))]
        if not self._is_stored:
            self._stored = {}

    def key(self, version: int | str, arguments: Mapping[str, object]) -> str | None:
        key = super().key(version, arguments)
        self._num_asked += 1
        if self._is_stored and key not in self._stored:
            self.num_lacking += 1
        return key

    def keep(self, key: str, response: tinker.SampleResponse) -> None:
        """Hold it until the step is whole."""
        answer = encode_answer(response)
        if answer is not None and not self._is_stored:
            self._lines[key] = make_line({"key": key, "answer": answer})

    async def close(self, *, is_whole: bool) -> None:
        """Write the step, if every call of it was answered."""
        if not is_whole or self._is_stored or len(self._lines) < self._num_asked:
            return
        end = make_line(self._end(len(self._lines)))
        write_atomic(self.path, b"".join([*self._lines.values(), end]).decode())

    def _end(self, num_answers: int) -> dict[str, object]:
        return {"end": num_answers, "environment": self._environment}


class _CachedResponse:
    """An answer from the journal, awaited like one of the engine's."""

    def __init__(self, response: tinker.SampleResponse) -> None:
        self._response = response

    def __await__(self) -> Generator[None, None, tinker.SampleResponse]:
        yield  # the others have their turn, as with an engine
        return self._response

    def result(self, timeout: float | None = None) -> tinker.SampleResponse:
        """The answer."""
        return self._response


class _RecordingFuture:
    """The engine's answer, kept when it arrives."""

    def __init__(self, pending: Any, answers: _Answers, key: str | None) -> None:
        self._pending = pending
        self._answers = answers
        self._key = key

    def __await__(self) -> Generator[object, None, tinker.SampleResponse]:
        return self._wait().__await__()

    def result(self, timeout: float | None = None) -> tinker.SampleResponse:
        """The answer; blocks until it is there."""
        return self._keep(self._pending.result(timeout))

    async def _wait(self) -> tinker.SampleResponse:
        return self._keep(await response_of(self._pending))

    def _keep(self, response: tinker.SampleResponse) -> tinker.SampleResponse:
        if self._key is not None and all(map(_is_usable, response.sequences)):
            self._answers.keep(self._key, response)
        return response


def _is_usable(sequence: tinker.SampledSequence) -> bool:
    """Whether a reply has tokens, and finite logprobs if it has any."""
    return bool(sequence.tokens) and all(map(math.isfinite, sequence.logprobs or ()))


# lines of the journal: arrays are kept as their bytes, lists of numbers as JSON, so that every bit comes back


def call_key(version: int | str, arguments: Mapping[str, object]) -> str | None:
    """A digest of a policy's version and the arguments of ``sample``; ``None`` if one is of a kind without digest."""
    digest = hashlib.blake2b(repr(version).encode(), digest_size=16)
    for name in sorted(arguments):
        value = arguments[name]
        digest.update(b"\0" + name.encode() + b"\0")
        if isinstance(value, tinker.ModelInput):
            _add_prompt(digest.update, value)
        elif isinstance(value, BaseModel):
            digest.update(value.model_dump_json().encode())
        elif isinstance(value, _PLAIN):
            digest.update(repr(value).encode())
        else:
            return None
    return digest.hexdigest()


def _add_prompt(update: Callable[[bytes], None], prompt: tinker.ModelInput) -> None:
    for chunk in prompt.chunks:
        if isinstance(chunk, tinker.EncodedTextChunk):
            update(np.asarray(chunk.tokens, dtype=np.int64).tobytes())
        else:
            update(b"\1" + chunk.model_dump_json().encode())


def make_line(body: Mapping[str, object]) -> bytes:
    """A line of JSON with a checksum of its content."""
    return _checked(json.dumps(body, separators=(",", ":"), allow_nan=True).encode())


def read_line(line: bytes) -> dict[str, Any] | None:
    """The content of a line; ``None`` if it is not as it was written."""
    text = line[_BEGIN:_END]
    return json.loads(text) if line == _checked(text) else None


def _checked(text: bytes) -> bytes:
    check = hashlib.blake2b(text, digest_size=8).hexdigest().encode()
    return b'{"check": "%b", "line": %b}\n' % (check, text)


_END = -len(b"}\n")
_BEGIN = len(_checked(b"")) + _END
"""Place of the content in a line."""


def encode_answer(response: tinker.SampleResponse) -> dict[str, object] | None:
    """A response as JSON; ``None`` if it holds something that JSON would not give back."""
    try:
        whole = {name: _encode(value) for name, value in _values(tinker.SampleResponse, response)}
        whole["sequences"] = [
            {name: _encode(value) for name, value in _values(tinker.SampledSequence, sequence)}
            for sequence in response.sequences
        ]
    except TypeError:
        return None
    return whole


def decode_answer(stored: Mapping[str, Any]) -> tinker.SampleResponse:
    """The response that `encode_answer` was given."""
    whole = {name: _decode(value) for name, value in stored.items() if name != "sequences"}
    sequences = [
        tinker.SampledSequence(**{name: _decode(value) for name, value in sequence.items()})
        for sequence in stored["sequences"]
    ]
    return tinker.SampleResponse(sequences=sequences, **whole)


def _values(response_class: type, response: object) -> list[tuple[str, object]]:
    """The values of a response; missing ones are left out."""
    values = [(field.name, getattr(response, field.name, None)) for field in fields(response_class)]
    return [(name, value) for name, value in values if name != "sequences" and value is not None]


def _encode(value: Any) -> object:
    if isinstance(value, np.ndarray):
        text = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": text, "dtype": value.dtype.str, "shape": value.shape}
    if isinstance(value, list | tuple):
        return {"list": [_encode(item) for item in value], "tuple": isinstance(value, tuple)}
    if hasattr(value, "token_ids") and hasattr(value, "logprobs"):
        return {"topk": [_encode(value.token_ids), _encode(value.logprobs)]}
    if not isinstance(value, _PLAIN):
        raise TypeError(f"{type(value).__name__} has no place in the journal")
    return value


def _decode(value: object) -> Any:
    if not isinstance(value, dict):
        return value
    if "array" in value:
        data = base64.b64decode(value["array"])
        return np.frombuffer(data, dtype=value["dtype"]).reshape(value["shape"]).copy()
    if "topk" in value:
        return make_topk(*(_decode(part) for part in value["topk"]))
    items = [_decode(item) for item in value["list"]]
    return tuple(items) if value["tuple"] else items
