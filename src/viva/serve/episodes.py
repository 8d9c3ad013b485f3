"""Episodes of agents that run elsewhere: what an agent asks is an observation, what the policy says its answer.

An episode has a key of its own, which its agent gives as its API key. The policy is whoever takes the calls: the
rollouts of a run, so that what an agent hears is what is trained, token for token.
"""

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import tinker
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers.base import Renderer

from viva.conversation.rendering import build_prompt
from viva.loopback import LOOPBACK, listen, server_config
from viva.serve.answers import Answer, chat_messages
from viva.serve.bodies import ChatBody, RequestError, parse_body, read_json
from viva.serve.sampling import Job, Piece, SampleText, ScoredPrompt, Token
from viva.serve.transport import (
    Endpoint,
    TokenGuard,
    given_key,
    http_error,
    json_answer,
    read_body,
    telling,
    unless_gone,
)

_BODY_BYTES = 16 * 2**20
_MOST_WAITING = 64
"""Calls of one agent at once."""
_OF_THE_RUN = ("temperature", "top_p", "top_k", "seed", "n", "stop", "max_tokens", "max_completion_tokens")
"""Fields that say how to sample, which the run decides: it trains on what it sampled."""
_NOT_HERE = ("stream", "logprobs", "top_logprobs", "prompt_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply of the policy."""

    tokens: Sequence[int]
    stop_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """A call of an agent."""

    body: ChatBody
    prompt: tinker.ModelInput
    reply: asyncio.Future[Reply]


@dataclass(kw_only=True)
class Episode:
    """One episode."""

    key: str
    """The agent's API key."""
    calls: asyncio.Queue[AgentCall] = field(
        default_factory=lambda: asyncio.Queue[AgentCall](maxsize=_MOST_WAITING)
    )
    reward: float | None = None
    """As the agent posted it."""


class EpisodeServer:
    """OpenAI's chat interface for the agents of episodes, in the event loop of whoever opens episodes.

    It listens on the loopback address while an episode is open.

    Args:
        renderer: Of the policy's chat format, with a guarded tokenizer.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._episodes: dict[str, Episode] = {}
        self._token = secrets.token_urlsafe(24)
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._address = ""

    @property
    def address(self) -> str:
        """``OPENAI_BASE_URL`` for agents, while an episode is open."""
        return f"{self._address}/v1"

    @property
    def stop_condition(self) -> StopCondition:
        """Strings or ids that end a reply."""
        return self._renderer.get_stop_sequences()

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Episode]:
        """An episode; calls that nobody has answered at its end are refused."""
        episode = Episode(key=f"{self._token}.{secrets.token_urlsafe(9)}")
        self._episodes[episode.key] = episode
        try:
            self._start()
            yield episode
        finally:
            del self._episodes[episode.key]
            while not episode.calls.empty():
                refuse(episode.calls.get_nowait())
            if not self._episodes:
                await self._stop()

    def _start(self) -> None:
        if self._server is not None:
            return
        listener = listen(0)
        self._address = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        self._server = _Server(server_config(self._app()))
        self._serving = asyncio.ensure_future(self._server.serve([listener]))

    async def _stop(self) -> None:
        server, serving = self._server, self._serving
        self._server = self._serving = None
        if server is not None and serving is not None:
            server.should_exit = server.force_exit = True
            await asyncio.wait({serving})

    def _app(self) -> TokenGuard:
        routes = [
            Route("/v1/chat/completions", Endpoint(self._chat), methods=["POST"]),
            Route("/v1/reward", Endpoint(self._reward), methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: http_error})
        return TokenGuard(app, token=self._token, checks_host=True, ends_at=".")

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        episode = self._episode(scope)
        body = _read(await read_body(scope, receive, _BODY_BYTES))
        answer = await unless_gone(self._ask(episode, body), receive)
        await json_answer(answer)(scope, receive, send)

    async def _reward(self, scope: Scope, receive: Receive, send: Send) -> None:
        episode = self._episode(scope)
        given = read_json(await read_body(scope, receive, _BODY_BYTES))
        if set(given) != {"reward"} or not is_reward(given["reward"]):
            raise RequestError('the body must be {"reward": NUMBER} with a finite number')
        episode.reward = float(given["reward"])
        await json_answer({"reward": episode.reward})(scope, receive, send)

    def _episode(self, scope: Scope) -> Episode:
        key = given_key(Headers(scope=scope))
        if key not in self._episodes:
            raise RequestError("the episode of this key is over", status=410, code="episode_over")
        return self._episodes[key]

    async def _ask(self, episode: Episode, body: ChatBody) -> dict[str, Any]:
        """The policy's answer to an agent."""
        with telling():
            prompt = build_prompt(self._renderer, chat_messages(body))
        call = AgentCall(body=body, prompt=prompt, reply=asyncio.get_running_loop().create_future())
        try:
            episode.calls.put_nowait(call)
        except asyncio.QueueFull as error:
            raise RequestError(f"{_MOST_WAITING} calls of this episode wait already", status=429) from error
        return self._written(body, prompt, await call.reply)

    def _written(self, body: ChatBody, prompt: tinker.ModelInput, reply: Reply) -> dict[str, Any]:
        stops = self.stop_condition
        strings = tuple(stop for stop in stops if isinstance(stop, str))
        tokenizer: Any = self._renderer.tokenizer
        ids = tuple(stop for stop in stops if isinstance(stop, int))
        text = SampleText(tokenizer, ids, strings)
        pieces: list[Piece] = []
        for place, token in enumerate(reply.tokens, start=1):
            said = text.feed(token)
            if place == len(reply.tokens):
                said += text.finish()
            part = Token(id=token, text="", logprob=0.0, alternatives=())
            pieces.append(Piece(choice=0, token=part, text=said, finish_reason=reply.stop_reason))
        scored = ScoredPrompt(tokens=tuple(prompt.to_ints()))
        return Answer(body, Job(prompts=(scored.tokens,))).whole(pieces, [scored])


def refuse(call: AgentCall) -> None:
    """Tell an agent that its episode is over, if it still waits for this answer."""
    if not call.reply.done():
        call.reply.set_exception(RequestError("the episode is over", status=410, code="episode_over"))


class _Server(uvicorn.Server):
    """Leaves signals to the run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Capture nothing."""
        yield


def is_reward(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read(raw: bytes) -> ChatBody:
    given = {name: value for name, value in read_json(raw).items() if value is not None}
    for name in (*_OF_THE_RUN, *_NOT_HERE):
        if given.get(name) not in (None, False) and not (name == "n" and given[name] == 1):
            why = "the run decides it" if name in _OF_THE_RUN else "an agent's episode has no such answer"
            raise RequestError(f"{name}: {why}; leave it out", param=name, code="unsupported_parameter")
    return parse_body(ChatBody, raw)
