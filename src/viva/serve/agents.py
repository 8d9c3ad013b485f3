"""An agent's command as an environment: a process for each episode, which asks the policy as OpenAI's clients do."""

import asyncio
import contextlib
import json
import math
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

import tinker
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, Observation, StepResult

from viva.serve.episodes import AgentCall, Episode, EpisodeServer, PolicyReply, refuse

_KEPT = 2**16
"""Bytes of an agent's output that are kept: the last ones."""
_SHOWN = 400
_CLOSING_S = 2.0
"""Longest time for the output of an agent that has ended: a helper that left its process group may hold it open."""


class AgentFailedError(RuntimeError):
    """An agent's process ended without a reward, or not at all."""


class _Watched(asyncio.SubprocessProtocol):
    """The end and the last output of a process.

    With asyncio's streams, Python 3.11 would wait until everybody who inherited its pipes has closed them.
    """

    def __init__(self) -> None:
        self.output = {1: b"", 2: b""}
        self.ended = asyncio.Event()
        self.closed = asyncio.Event()
        """It has ended, and so has its output."""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keep the last of it."""
        self.output[fd] = (self.output[fd] + data)[-_KEPT:]

    def process_exited(self) -> None:
        """Take note, whoever still holds its pipes."""
        self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take note."""
        del exc
        self.closed.set()

    def text(self, fd: int) -> str:
        """The end of what it wrote."""
        return self.output[fd].decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """Command and limits of an agent."""

    argv: tuple[str, ...]
    timeout_s: float
    """Longest time of an episode, from the start of its process on."""
    slots: asyncio.Semaphore
    """One for each process that may run at once."""


class AgentEnv(Env):
    """One episode.

    The process gets the problem as one line of JSON on its standard input, and ``OPENAI_BASE_URL`` and
    ``OPENAI_API_KEY`` in its environment. Its reward is what it posts to ``/v1/reward``, else the number in the last
    line of its standard output.
    """

    def __init__(self, server: EpisodeServer, command: AgentCommand, problem: dict[str, str | None]) -> None:
        self._server = server
        self._command = command
        self._problem = problem
        self._stack = contextlib.AsyncExitStack()
        self._episode: Episode | None = None
        self._process = _Watched()
        self._transport: asyncio.SubprocessTransport | None = None
        self._deadline = math.inf
        self._call: AgentCall | None = None

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """Start the agent and wait for what it asks first.

        Raises:
            AgentFailedError: If it ends without asking anything.
        """
        await self._stack.enter_async_context(self._command.slots)
        self._episode = await self._stack.enter_async_context(self._server.open())
        await self._start(self._episode)
        call = await self._next()
        if call is None:
            raise AgentFailedError(f"the agent asked the policy nothing; {self._ending()}")
        return call.prompt, self._server.stop_condition

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Answer the agent, and wait for its next call or its end.

        Raises:
            AgentFailedError: If it fails, takes too long, or ends without a reward.
        """
        assert self._call is not None  # there was an observation
        if not self._call.reply.done():  # else it hung up
            reason = (extra or {}).get("stop_reason", "stop")
            self._call.reply.set_result(PolicyReply(tokens=action, stop_reason=str(reason)))
        call = await self._next()
        reward, observation = 0.0, tinker.ModelInput.empty()
        if call is not None:
            observation = call.prompt
        else:
            reward = self._reward()
            await self.close()
        return StepResult(
            reward=reward,
            episode_done=call is None,
            next_observation=observation,
            next_stop_condition=self._server.stop_condition,
        )

    async def abort(self, reason: str) -> None:
        """End the episode; its group goes on without it."""
        del reason
        await self.close()

    async def close(self) -> None:
        """End what is left of the process; a second time it does nothing."""
        await self._end()
        if self._call is not None:
            refuse(self._call)
        await self._stack.aclose()

    async def _start(self, episode: Episode) -> None:
        variables = {"OPENAI_BASE_URL": self._server.address, "OPENAI_API_KEY": episode.key}
        pipe = asyncio.subprocess.PIPE
        self._transport, self._process = await asyncio.get_running_loop().subprocess_exec(
            _Watched,
            *self._command.argv,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        self._deadline = asyncio.get_running_loop().time() + self._command.timeout_s
        stdin = self._transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        stdin.write(json.dumps(self._problem).encode() + b"\n")
        stdin.close()  # once that is written, or nobody reads it

    async def _end(self) -> None:
        """End the agent with all it started, and take what it wrote; a second time, or before its start, do nothing."""
        if self._transport is None or self._transport.is_closing():
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.closed.wait(), _CLOSING_S)
        self._transport.close()

    async def _asked(self, episode: Episode) -> AgentCall:
        """The next call whose client still waits for its answer."""
        while (call := await episode.calls.get()).reply.done():
            pass
        return call

    async def _next(self) -> AgentCall | None:
        """The agent's next call, or ``None`` once it has ended.

        Raises:
            AgentFailedError: If its time is over.
        """
        assert self._episode is not None
        asking = asyncio.ensure_future(self._asked(self._episode))
        ending = asyncio.ensure_future(self._process.ended.wait())
        left_s = self._deadline - asyncio.get_running_loop().time()
        try:
            await asyncio.wait({asking, ending}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                self._call = asking.result()
                return self._call
            if ending.done():
                await self._end()
                return None
            raise AgentFailedError(f"the agent took longer than {self._command.timeout_s:g} s")
        finally:
            for task in (asking, ending):
                task.cancel()
            await asyncio.gather(asking, ending, return_exceptions=True)

    def _reward(self) -> float:
        assert self._episode is not None
        assert self._transport is not None
        if self._transport.get_returncode() != 0:
            raise AgentFailedError(self._ending())
        if self._episode.reward is not None:
            return self._episode.reward
        lines = self._process.text(1).split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        try:
            reward = float(last)
        except ValueError:
            reward = math.nan
        if not math.isfinite(reward):
            raise AgentFailedError(
                f"the agent gave no reward: it posted none, and its last line is no finite number: {last[:_SHOWN]!r}"
            )
        return reward

    def _ending(self) -> str:
        assert self._transport is not None
        errors = self._process.text(2).strip()
        return f"it ended with status {self._transport.get_returncode()}: {errors[-_SHOWN:]}"


@dataclass(kw_only=True, eq=False)
class AgentGroupBuilder(EnvGroupBuilder):
    """Episodes of one problem, which are compared with one another."""

    server: EpisodeServer
    command: AgentCommand
    problem: dict[str, str | None]
    group_size: int
    _envs: list[AgentEnv] = field(default_factory=list[AgentEnv], init=False)

    async def make_envs(self) -> Sequence[Env]:
        """The episodes; their processes start when they are played."""
        self._envs = [AgentEnv(self.server, self.command, self.problem) for _ in range(self.group_size)]
        return self._envs

    async def cleanup(self) -> None:
        """End what is left of the processes."""
        for env in self._envs:
            await env.close()

    def logging_tags(self) -> list[str]:
        """``agent``."""
        return ["agent"]
