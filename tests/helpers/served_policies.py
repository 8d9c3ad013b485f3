"""``viva serve`` in this process: a server in a thread, on a free port, while a context lasts."""

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai
import uvicorn

from viva.conversation.rendering import load_renderer
from viva.engine import LocalServiceClient
from viva.loopback import listen, server_config
from viva.serve.app import ServerLimits, make_app
from viva.serve.sampling import ServedPolicy
from viva.serve.tinker_engine import TinkerEngine
from viva.serve.tinker_store import ServedWeights
from viva.serve.transport import EngineThread

TOKEN = "tml-for-the-tests-of-the-server"


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running server."""

    address: str
    engine: EngineThread
    service: LocalServiceClient
    policy: ServedPolicy
    tinker: TinkerEngine
    clients: list[openai.OpenAI] = field(default_factory=list)

    def client(self, **options: Any) -> openai.OpenAI:
        """A client, closed with the server."""
        self.clients.append(openai.OpenAI(**self._options(options)))
        return self.clients[-1]

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": f"{self.address}/v1", "api_key": TOKEN, "max_retries": 0} | options

    def sequences(self) -> list[Any]:
        """What the engine is decoding."""
        return [each for decoder in self.service._core._decoders for each in decoder._running.sequences]

    @contextmanager
    def engine_at_rest(self) -> Generator[None]:
        """Within this context, the engine's thread stands still between two units of work."""
        reached, go_on = threading.Event(), threading.Event()

        async def rest() -> None:
            reached.set()
            go_on.wait(60)

        resting = asyncio.run_coroutine_threadsafe(rest(), self.engine._loop)
        assert reached.wait(60)
        try:
            yield
        finally:
            go_on.set()
            resting.result(60)


async def _open(model: str, name: str, state_dir: Path) -> tuple[LocalServiceClient, ServedPolicy]:
    service = LocalServiceClient(state_dir=state_dir, shared_batch=True)  # as `viva serve` makes it
    client = await service.create_sampling_client(base_model=model)
    return service, ServedPolicy(name, client, load_renderer(client.get_tokenizer(), model_name=model))


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def served_app(app: Any) -> Generator[str]:
    """The address of an application."""
    with listen(0) as listener:
        server = uvicorn.Server(server_config(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


@contextmanager
def serving_policy(
    model: str, *, name: str = "policy", state_dir: Path | None = None, **limits: Any
) -> Generator[Served]:
    """A server of one base model, which saves in a folder or in one that goes with it."""
    engine = EngineThread()
    with TemporaryDirectory() as temporary:
        states = state_dir or Path(temporary)
        try:
            service, policy = engine.do(_open(model, name, states))
            tinker = TinkerEngine(
                ServedWeights(service=service, model=model, names=(name,), state_dir=states)
            )
            app = make_app(engine, policy, token=TOKEN, limits=ServerLimits(**limits), tinker=tinker)
            with served_app(app) as address:
                served = Served(address=address, engine=engine, service=service, policy=policy, tinker=tinker)
                yield served
                for client in served.clients:
                    client.close()
        finally:
            engine.close()
