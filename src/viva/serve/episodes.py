"""Episodes of agents that run elsewhere: what an agent asks is an observation, what the policy says its answer.

An episode has a key of its own, which its agent gives as its API key. The policy is whoever takes the calls: the
rollouts of a run, so that what an agent hears is what is trained, token for token.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import tinker
import uvicorn
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers.base import Renderer

from viva.conversation.rendering import build_prompt
from viva.loopback import LOOPBACK, listen, same_secret, server_config
from viva.serve.answers import PendingAnswer, chat_messages
from viva.serve.bodies import ChatBody, JsonObject, RequestError, RewardBody, parse_body, read_json
from viva.serve.sampling import Piece, SampleText, SamplingJob, ScoredPrompt, Token, stops_of
from viva.serve.transport import TokenGuard, application, given_key, json_answer, read_body, unless_gone

_BODY_BYTES = 16 * 2**20
_MOST_WAITING = 64
"""Calls of one agent at once."""
_OF_THE_RUN = ("temperature", "top_p", "top_k", "seed", "n", "stop", "max_tokens", "max_completion_tokens")
"""Fields that say how to sample, which the run decides: it trains on what it sampled."""
_NOT_HERE = ("stream", "logprobs", "top_logprobs", "prompt_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReply:
    """A reply of the policy."""

    tokens: Sequence[int]
    stop_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """A call of an agent."""

    prompt: tinker.ModelInput
    reply: asyncio.Future[PolicyReply]


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

    It listens on the loopback address while an episode is open. Its renderer has a guarded tokenizer.
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
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/reward", self._reward, methods=["POST"]),
        ]
        return TokenGuard(
            application(routes),
            is_known=lambda key: same_secret(key.partition(".")[0], self._token),
            checks_host=True,
        )

    async def _chat(self, request: Request) -> Response:
        episode = self._episode(request)
        body = _read(await read_body(request, _BODY_BYTES))
        return json_answer(await unless_gone(self._ask(episode, body), request.receive))

    async def _reward(self, request: Request) -> Response:
        episode = self._episode(request)
        given = read_json(await read_body(request, _BODY_BYTES))
        try:
            episode.reward = RewardBody.model_validate(given).reward
        except ValidationError as error:
            raise RequestError('the body must be {"reward": NUMBER} with a finite number') from error
        return json_answer({"reward": episode.reward})

    def _episode(self, request: Request) -> Episode:
        key = given_key(request.headers)
        if key not in self._episodes:
            raise _over()
        return self._episodes[key]

    async def _ask(self, episode: Episode, body: ChatBody) -> JsonObject:
        """The policy's answer to an agent."""
        prompt = build_prompt(self._renderer, chat_messages(body))
        call = AgentCall(prompt=prompt, reply=asyncio.get_running_loop().create_future())
        try:
            episode.calls.put_nowait(call)
        except asyncio.QueueFull as error:
            raise RequestError(f"{_MOST_WAITING} calls of this episode wait already", status=429) from error
        return self._written(body, prompt, await call.reply)

    def _written(self, body: ChatBody, prompt: tinker.ModelInput, reply: PolicyReply) -> JsonObject:
        strings, ids = stops_of(self._renderer)
        text = SampleText(self._renderer.tokenizer, ids, strings)
        said = [text.feed(token) for token in reply.tokens]
        if said:
            said[-1] += text.finish()
        pieces = [
            Piece(
                choice=0,
                token=Token(id=token, text="", logprob=0.0, alternatives=()),
                text=part,
                finish_reason=reply.stop_reason,
            )
            for token, part in zip(reply.tokens, said, strict=True)
        ]
        scored = ScoredPrompt(tokens=tuple(prompt.to_ints()))
        return PendingAnswer(body, SamplingJob(prompts=(scored.tokens,))).whole(pieces, [scored])


def refuse(call: AgentCall) -> None:
    """Tell an agent that its episode is over, if it still waits for this answer."""
    if not call.reply.done():
        call.reply.set_exception(_over())


def _over() -> RequestError:
    return RequestError("the episode of this key is over", status=410, code="episode_over")


class _Server(uvicorn.Server):
    """Leaves signals to the run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Capture nothing."""
        yield


def _read(raw: bytes) -> ChatBody:
    given = {name: value for name, value in read_json(raw).items() if value is not None}
    for name in (*_OF_THE_RUN, *_NOT_HERE):
        value = given.get(name)
        # 0 equals False, and says how to sample
        if value is not None and value is not False and not (name == "n" and value == 1):
            why = "the run decides it" if name in _OF_THE_RUN else "an agent's episode has no such answer"
            raise RequestError(f"{name}: {why}; leave it out", param=name, code="unsupported_parameter")
    return parse_body(ChatBody, raw)
