"""One seat in a conversation, as a tinker-cookbook environment."""

import tinker
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    InitialObservationOverflow,
    Metrics,
    Observation,
    StepResult,
)

from viva.conversation.coordinator import MultiAgentCoordinator
from viva.conversation.line_tokens import remembering
from viva.conversation.protocol import View
from viva.conversation.records import ReplyStatus
from viva.conversation.rendering import build_prompt, read_reply


class MultiAgentConversationEnv(Env):
    """What one agent of a conversation sees and does in one lane; all seats of a conversation share a coordinator.

    The policy is called once for every turn and never after the last one. Rewards come at the end, from the
    group's builder. A rollout loop that catches a failed policy call must tell `abort`, or the other agents
    wait for ever.

    Args:
        agent_id: The agent.
        coordinator: Shared by all seats of the conversation.
        renderer: From `viva.conversation.rendering.load_renderer`.
        lane: Which of the agent's parallel generations this seat makes.
    """

    def __init__(
        self,
        agent_id: int,
        coordinator: MultiAgentCoordinator,
        renderer: Renderer,
        lane: int = 0,
    ) -> None:
        self.agent_id = agent_id
        self.coordinator = coordinator
        self.renderer = renderer
        self.lane = lane
        self._asked: tuple[View, str] | None = None

    async def initial_observation(self) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """Wait for the first turn and return its prompt; an empty episode if the conversation is over."""
        observation = await self._next_observation()
        if observation is None:
            return InitialObservationOverflow(reward=0.0)
        return observation, self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Read the reply, hand it in and wait for the next turn, if there is one.

        The reply of an agent that has left, or to a conversation that ended meanwhile, is dropped.

        Returns:
            ``episode_done`` with an empty observation after the seat's last turn. Metrics: ``parse/ok``,
            ``parse/repaired`` and ``parse/unstructured`` (0 or 1), also as ``parse/<segment>/...`` where the protocol
            asks for more than one thing.

        Raises:
            RuntimeError: If there was no observation to act on.
        """
        if self._asked is None:
            raise RuntimeError(
                f"agent {self.agent_id} has nothing to reply to: call initial_observation first, and step "
                "only until the episode is done"
            )
        (view, prompt), self._asked = self._asked, None
        text, _ = read_reply(self.renderer, action)
        segment = self.coordinator.protocol.rounds[view.round_index].segments[self.lane]
        reading = segment.read(text, view)
        if not self.coordinator.is_out(self.agent_id, self.lane):
            await self.coordinator.submit_response(
                self.agent_id,
                reading.response,
                lane=self.lane,
                prompt=prompt,
                text=text,
                status=reading.status,
            )
        observation = await self._next_observation()
        return StepResult(
            reward=0.0,
            episode_done=observation is None,
            next_observation=tinker.ModelInput.empty() if observation is None else observation,
            next_stop_condition=self.renderer.get_stop_sequences(),
            metrics=self._parse_metrics(segment.name, reading.status),
            logs={"segment": segment.name, "strategy": reading.strategy},
        )

    @property
    def round_index(self) -> int | None:
        """Round of the turn that was asked for and not replied to yet, from 0; ``None`` if there is none."""
        return None if self._asked is None else self._asked[0].round_index

    async def abort(self, reason: str) -> None:
        """Leave the conversation because the agent's policy failed, timed out or was cancelled."""
        await self.coordinator.fail(self.agent_id, reason)

    def _parse_metrics(self, segment: str, status: ReplyStatus) -> Metrics:
        metrics: Metrics = {f"parse/{known}": float(status is known) for known in ReplyStatus}
        names = {asked.name for round_ in self.coordinator.protocol.rounds for asked in round_.segments}
        if len(names) > 1:
            metrics |= {f"parse/{segment}/{known}": float(status is known) for known in ReplyStatus}
        return metrics

    async def _next_observation(self) -> Observation | None:
        if await self.coordinator.wait_for_turn(self.agent_id, self.lane) is None:
            return None
        protocol = self.coordinator.protocol
        view = self.coordinator.view(self.agent_id, self.lane)
        turns = self.coordinator.visible_turns(self.agent_id, self.lane)
        prompt = protocol.prompt(self.coordinator.question, turns, view, self.lane)
        self._asked = (view, prompt)
        with remembering(self.coordinator.line_tokens):
            return build_prompt(self.renderer, protocol.messages(prompt))
