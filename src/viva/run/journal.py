"""The journal: what the engine has answered in the steps that no checkpoint covers yet, so that it is not asked again.

Between the loop and the sampling clients of a step stands a `JournaledClient`. It keeps every answer (turns, judges'
comparisons, experts' samples, evaluations) in ``journal/<step>.jsonl``, found by a digest of what was asked: the
version of the policy, the prompt, the settings with their seed, and how many equal calls there were before. A run that
goes on from a checkpoint does the steps after it again, and takes their answers from there. A checkpoint ends the
journal of the steps that it covers. A line that is torn or damaged is as if it had never been written: its call is made
again.

Engines differ in what an answer depends on:

``turns``
    An engine that answers every call by itself, as servers do. An answer is kept as it comes; those that come while
    others are being written go to the disk together, with one fsync. Whatever was finished is not sampled again.
``steps``
    An engine whose answers depend, in their last bits, on what else it decodes and has decoded: the local one. Answers
    of the journal beside fresh ones would change those, so a step is taken from the journal as a whole, once all of it
    was sampled, or else sampled again: with the same result, to the bit. Its file is written in one piece, and counts
    only under the versions and settings under which it was written.
``off``
    Such an engine while it samples and trains at the same time: no step is whole.
"""

import asyncio
import functools
import inspect
import os
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import tinker

from viva.judging.policy import SamplingClient
from viva.run.clients import answers_together
from viva.run.files import naming, write_atomic
from viva.run.journal_lines import call_key, decode_answer, encode_answer, make_line, read_line

__all__ = ["Journal", "JournalMode", "JournaledClient"]

JournalMode: TypeAlias = Literal["turns", "steps", "off"]


class Journal:
    """The journal of a run folder.

    Args:
        folder: Of its files.
        environment: What the answers of a ``steps`` engine depend on besides the run's options.
    """

    def __init__(self, folder: Path, *, environment: Callable[[], Mapping[str, str]]) -> None:
        self._folder = folder
        self._environment = environment
        self._open: dict[str, _Answers] = {}
        self._now: _Answers | None = None

    def client(self, client: SamplingClient, version: int | str) -> "JournaledClient":
        """A client whose calls during a `part` go through the journal.

        Args:
            client: Who is asked.
            version: Tells its weights from those of the run's other clients.
        """
        return JournaledClient(client, version, self)

    @asynccontextmanager
    async def part(
        self, name: str, mode: JournalMode, *, is_last: bool, report: Callable[[str], None]
    ) -> AsyncGenerator[None]:
        """A part of a step, at whose end no call of it is under way. Parts do not overlap.

        Args:
            name: Of the step's file, which begins with the step's number.
            mode: See the module.
            is_last: Whether the step has no further part.
            report: Is told how many answers of the step came from the journal, if any did.

        Raises:
            OSError: If the journal cannot be written.
        """
        if mode == "off":
            yield
            return
        answers = self._open.pop(name, None) or self._begin(name, mode)
        self._now = answers
        try:
            yield
        except BaseException:
            self._now = None
            await answers.close(is_whole=False)
            raise
        self._now = None
        if not is_last:
            self._open[name] = answers
            return
        await answers.close(is_whole=True)
        if answers.num_taken:
            report(answers.told())

    async def close(self) -> None:
        """Nothing follows; steps that were begun end early."""
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

    def call(
        self, version: int | str, ask: Callable[[], Any], arguments: Callable[[], Mapping[str, Any]]
    ) -> Any:
        """What a client's ``sample`` returns: a kept answer, or what the engine returns, whose answer is kept."""
        if self._now is None:
            return ask()
        key = self._now.key(version, arguments())
        stored = self._now.take(key)
        return _Asked(ask(), self._now, key) if stored is None else _Kept(decode_answer(stored))

    def _begin(self, name: str, mode: JournalMode) -> "_Answers":
        path = self._folder / f"{name}.jsonl"
        return _Turns(path) if mode == "turns" else _Step(path, dict(self._environment()))


class JournaledClient:
    """A sampling client that asks the journal first. Everything but ``sample`` is the client's own."""

    def __init__(self, client: SamplingClient, version: int | str, journal: Journal) -> None:
        self._client = client
        self.answers_together = answers_together(client)
        signature = inspect.signature(client.sample)

        # the signature stays that of the client: judges look there for what it can return
        @functools.wraps(client.sample)
        def sample(*args: Any, **options: Any) -> Any:
            return journal.call(
                version,
                lambda: client.sample(*args, **options),
                lambda: signature.bind(*args, **options).arguments,
            )

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
        self._places: dict[str, tuple[int, int]] = {}
        """Offset and length of the line with an answer."""
        self._calls: Counter[str] = Counter()

    def key(self, version: int | str, arguments: Mapping[str, Any]) -> str | None:
        """The place of a call that is made now."""
        call = call_key(version, arguments)
        if call is None:
            return None
        self._calls[call] += 1
        return f"{call}-{self._calls[call]}"

    def take(self, key: str | None) -> Mapping[str, Any] | None:
        """The stored answer to a call, if there is one."""
        if key is None or key not in self._places:
            return None
        offset, length = self._places[key]
        with naming(self.path), self.path.open("rb") as file:
            file.seek(offset)
            body = read_line(file.read(length))
        if body is not None:
            self.num_taken += 1
        return None if body is None else body["answer"]

    def told(self) -> str:
        """What was taken, in words."""
        lacking = f"; it lacks {self.num_lacking}, which are asked for again" if self.num_lacking else ""
        return f"{self.num_taken} answers are taken from the journal: they were sampled before{lacking}"

    @abstractmethod
    def keep(self, key: str, response: Any) -> None:
        """Keep an answer."""

    @abstractmethod
    async def close(self, *, is_whole: bool) -> None:
        """The step has no further part; `is_whole` unless something ended it early."""

    def _read(self) -> list[dict[str, Any]]:
        """What is stored besides answers. The places of the answers are noted."""
        others: list[dict[str, Any]] = []
        offset = 0
        with naming(self.path):
            stored = self.path.read_bytes() if self.path.exists() else b""
        for line in stored.splitlines(keepends=True):
            body = read_line(line)
            if body is not None and "key" in body:
                self._places[body["key"]] = (offset, len(line))
            elif body is not None:
                others.append(body)
            offset += len(line)
        return others


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

    def keep(self, key: str, response: Any) -> None:
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
        try:
            while data:  # a disk may take less than it is given
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

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
        self._is_stored = ends == [self._end(len(self._places))]
        if not self._is_stored:
            self._places = {}

    def key(self, version: int | str, arguments: Mapping[str, Any]) -> str | None:
        """The place of a call that is made now."""
        key = super().key(version, arguments)
        self._num_asked += 1
        if self._is_stored and key not in self._places:
            self.num_lacking += 1
        return key

    def keep(self, key: str, response: Any) -> None:
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

    def _end(self, num_answers: int) -> dict[str, Any]:
        return {"end": num_answers, "environment": self._environment}


class _Kept:
    """What is awaited for an answer that is there."""

    def __init__(self, response: tinker.SampleResponse) -> None:
        self._response = response

    def __await__(self) -> Generator[None, None, tinker.SampleResponse]:
        yield  # the others have their turn, as with an engine
        return self._response

    def result(self, timeout: float | None = None) -> tinker.SampleResponse:
        """The answer."""
        del timeout
        return self._response


class _Asked:
    """What is awaited for an answer that the engine will give, and that will be kept."""

    def __init__(self, pending: Any, answers: _Answers, key: str | None) -> None:
        self._pending = pending
        self._answers = answers
        self._key = key

    def __await__(self) -> Generator[Any, None, tinker.SampleResponse]:
        return self._wait().__await__()

    def result(self, timeout: float | None = None) -> tinker.SampleResponse:
        """The answer; blocks until it is there."""
        return self._keep(self._pending.result(timeout))

    async def _wait(self) -> tinker.SampleResponse:
        if inspect.isawaitable(self._pending):
            return self._keep(await cast(Awaitable[tinker.SampleResponse], self._pending))
        return self._keep(await asyncio.wrap_future(cast("Future[tinker.SampleResponse]", self._pending)))

    def _keep(self, response: tinker.SampleResponse) -> tinker.SampleResponse:
        if self._key is not None:
            self._answers.keep(self._key, response)
        return response
