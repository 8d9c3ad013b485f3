"""What a conversation leaves behind: frozen values that can be stored, read back and scored again.

Indices: ``agent_id`` counts from 0 to ``num_agents - 1``; ``round_index`` counts from 0. A turn belongs to
the round it was prompted for, whenever its reply arrives.
"""

from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

__all__ = ["AgentResponse", "Conversation", "Failure", "ReplyStatus", "Turn"]


class AgentResponse(BaseModel):
    """One agent's structured reply."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    reflection: str = ""
    """What the agent learned from the conversation so far."""
    evaluation: str = ""
    """What the agent thinks is right or wrong in the others' solutions."""
    solution: str
    """The agent's own full solution to the problem."""


class ReplyStatus(StrEnum):
    """How a reply was read. Compare with ``is``; every member is truthy."""

    OK = "ok"
    """A JSON object with the asked fields, and nothing else."""
    REPAIRED = "repaired"
    """The fields were found inside a fence, other text, or tags."""
    UNSTRUCTURED = "unstructured"
    """No fields were found; the whole text is the solution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One reply of one agent."""

    agent_id: int
    round_index: int
    prompt: str
    """The user message this agent answered (without the chat template)."""
    text: str
    """The reply as decoded, without end-of-turn token and thinking."""
    response: AgentResponse
    status: ReplyStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an agent left the conversation before its last turn."""

    agent_id: int
    round_index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A whole conversation, turns in order of (round, agent)."""

    question: str
    num_agents: int
    max_rounds: int
    turns: tuple[Turn, ...]
    failures: tuple[Failure, ...] = ()

    @property
    def final_solutions(self) -> dict[int, str]:
        """Solution of the last turn of every agent that did not fail, by agent id."""
        failed = {failure.agent_id for failure in self.failures}
        return {turn.agent_id: turn.response.solution for turn in self.turns if turn.agent_id not in failed}
