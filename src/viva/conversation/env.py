"""One agent's seat in a conversation, as a tinker-cookbook environment."""

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
from viva.conversation.prompts import conversation_messages, turn_prompt
from viva.conversation.records import ReplyStatus
from viva.conversation.rendering import build_prompt, read_reply
from viva.conversation.reply import parse_reply

__all__ = ["MultiAgentConversationEnv"]


class MultiAgentConversationEnv(Env):
    """What one agent of a conversation sees and does; all agents of a conversation share a coordinator.

    The policy is called once for every turn and never after the last one. Rewards come at the end, from the
    group's builder. A rollout loop that catches a failed policy call must tell `abort`, or the other agents
    wait for ever.

    Args:
        agent_id: The agent's seat.
        coordinator: Shared by all agents of the conversation.
        renderer: From `viva.conversation.rendering.load_renderer`.
        personas: Persona texts by agent id, see `viva.conversation.prompts.persona`.
    """

    def __init__(
        self,
        agent_id: int,
        coordinator: MultiAgentCoordinator,
        renderer: Renderer,
        personas: dict[int, str] | None = None,
    ) -> None:
        self.agent_id = agent_id
        self.coordinator = coordinator
        self.renderer = renderer
        self.personas = personas
        self._prompt: str | None = None

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
            ``episode_done`` with an empty observation after the agent's last turn. Metrics: ``parse/ok``,
            ``parse/repaired``, ``parse/unstructured``, ``truncated`` (0 or 1) and ``reply_tokens``.

        Raises:
            RuntimeError: If there was no observation to act on.
        """
        if self._prompt is None:
            raise RuntimeError(
                f"agent {self.agent_id} has nothing to reply to: call initial_observation first, and step "
                "only until the episode is done"
            )
        text, ended = read_reply(self.renderer, action)
        parsed = parse_reply(text)
        prompt, self._prompt = self._prompt, None
        if not self.coordinator.is_out(self.agent_id):
            await self.coordinator.submit_response(
                self.agent_id, parsed.response, prompt=prompt, text=text, status=parsed.status
            )
        stop_reason = (extra or {}).get("stop_reason")
        metrics: Metrics = {f"parse/{status}": float(parsed.status is status) for status in ReplyStatus}
        metrics["truncated"] = float(stop_reason == "length" if stop_reason else not ended)
        metrics["reply_tokens"] = len(action)
        observation = await self._next_observation()
        return StepResult(
            reward=0.0,
            episode_done=observation is None,
            next_observation=tinker.ModelInput.empty() if observation is None else observation,
            next_stop_condition=self.renderer.get_stop_sequences(),
            metrics=metrics,
            logs={"strategy": parsed.strategy},
        )

    async def abort(self, reason: str) -> None:
        """Leave the conversation because the agent's policy failed, timed out or was cancelled."""
        await self.coordinator.fail(self.agent_id, reason)

    async def _next_observation(self) -> Observation | None:
        round_index = await self.coordinator.wait_for_turn(self.agent_id)
        if round_index is None:
            return None
        self._prompt = turn_prompt(
            self.coordinator.question,
            self.coordinator.visible_turns(self.agent_id),
            agent_id=self.agent_id,
            round_index=round_index,
            max_rounds=self.coordinator.max_rounds,
            personas=self.personas,
        )
        return build_prompt(self.renderer, conversation_messages(self._prompt))
