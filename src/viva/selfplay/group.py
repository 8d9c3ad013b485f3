"""What the group builders of all self-play systems share: seats, the failure rule, and the transcript's common part."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from tinker_cookbook.rl.types import Env

from viva.conversation.coordinator import MultiAgentCoordinator
from viva.conversation.env import MultiAgentConversationEnv
from viva.conversation.records import Conversation

__all__ = [
    "ConversationVoidError",
    "Grader",
    "by_agent",
    "check_finished",
    "coordinator_of",
    "graded",
    "transcript",
]

Grader = Callable[[str, str], bool]
"""Whether a solution (first) gives the answer (second)."""


class ConversationVoidError(RuntimeError):
    """A conversation that gives no rewards, by the failure rule."""


def coordinator_of(env_group: Sequence[Env]) -> tuple[MultiAgentCoordinator, list[MultiAgentConversationEnv]]:
    """The coordinator that all environments of a group share, and the environments.

    Raises:
        ValueError: If they are not seats of one conversation, each given once.
    """
    seats = [env for env in env_group if isinstance(env, MultiAgentConversationEnv)]
    coordinators = {id(env.coordinator): env.coordinator for env in seats}
    places = {(env.agent_id, env.lane) for env in seats}
    if len(seats) < len(env_group) or len(coordinators) != 1 or len(places) < len(seats):
        raise ValueError(
            "rewards need the environments of one make_envs call, each once; got "
            f"{[type(env).__name__ for env in env_group]} of {len(coordinators)} conversations"
        )
    return next(iter(coordinators.values())), seats


def check_finished(coordinator: MultiAgentCoordinator) -> None:
    """Apply the protocol's failure rule to a conversation that has ended.

    Raises:
        ConversationVoidError: If the rule says that there are no rewards.
    """
    reasons = [
        f"agent {failure.agent_id} failed in round {failure.round_index + 1}: {failure.reason}"
        for failure in coordinator.conversation.failures
    ]
    waiting = sorted(
        {
            agent_id
            for agent_id, lane in coordinator.protocol.seats(coordinator.num_agents)
            if not coordinator.is_out(agent_id, lane)
        }
    )
    if waiting:
        reasons.append(f"agents {waiting} stopped before their last turn without giving a reason")
    if waiting or coordinator.num_agents_left < coordinator.min_agents:
        raise ConversationVoidError("; ".join(reasons))


def graded(solutions: dict[int, str], answer: str | None, grader: Grader | None) -> dict[int, bool] | None:
    """Whether each solution is right, by agent id; ``None`` where no answer is known or nobody can tell."""
    if answer is None or grader is None:
        return None
    return {agent_id: grader(solution, answer) for agent_id, solution in solutions.items()}


def by_agent(values: dict[int, Any] | None) -> dict[str, Any] | None:
    """The same by agent id as text, as JSON has it."""
    return None if values is None else {str(agent_id): value for agent_id, value in values.items()}


def transcript(
    conversation: Conversation, protocol: str, answer: str | None, *, system_prompt: str
) -> dict[str, Any]:
    """What every transcript keeps of a conversation, ready for JSON; scores are added by the system."""
    return {
        "question": conversation.question,
        "answer": answer,
        "protocol": protocol,
        "system_prompt": system_prompt,
        "num_agents": conversation.num_agents,
        "max_rounds": conversation.max_rounds,
        "turns": [
            {
                "agent_id": turn.agent_id,
                "round_index": turn.round_index,
                "segment": turn.segment,
                "lane": turn.lane,
                "prompt": turn.prompt,
                "text": turn.text,
                "response": turn.response.model_dump(),
                "status": turn.status.value,
            }
            for turn in conversation.turns
        ],
        "failures": [asdict(failure) for failure in conversation.failures],
        "comparisons": [],
        "rewards": {},
        "correct": None,
    }
