"""Values of a finished conversation: frozen, so that they can be stored, read back and scored again.

Indices: ``agent_id`` counts from 0 to ``num_agents - 1``; ``round_index`` counts from 0. A turn belongs to
the round it was prompted for, whenever its reply arrives.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, PlainSerializer

_STORED = ConfigDict(extra="ignore")
"""Fields of a stored turn that this version does not know are passed over."""


def encodable(text: str) -> str:
    """The text, its half characters (JSON can spell them, nothing can encode them) replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Reply(BaseModel):
    """Base of everything an agent's reply is read into."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    is_sampled: ClassVar[bool] = True
    """Whether the policy wrote it, so that tokens of the agent's trajectory belong to it."""


class Solution(Reply):
    """A reply that gives a solution."""

    solution: str
    """The agent's own full solution to the problem."""


class _Thoughts(Reply):
    reflection: str = ""
    """The agent's summary of what it learned so far."""
    evaluation: str = ""
    """The agent's opinion of the others' solutions."""


class AgentResponse(Solution, _Thoughts):
    """One agent's structured reply: reflection, evaluation and solution, in this order."""


class Revision(Solution):
    """A solution after critique."""

    decision: Literal["revise", "defend", "unstated"]
    """The agent's stated decision about its earlier solution, whatever the text then does."""


class Critique(BaseModel):
    """One agent's critique of another's solution."""

    model_config = ConfigDict(frozen=True)

    target: int
    """Agent whose solution is criticised."""
    text: str
    """Without the header that names the target."""
    start: int
    """Start of the critique in the text of the turn, its header included; in characters."""
    stop: int
    """End of it."""


class CritiqueReply(Reply):
    """All critiques of one reply, at most one for each target and none of the agent's own solution."""

    critiques: tuple[Critique, ...]
    dropped: dict[str, int]
    """Number of critiques that do not count, by cause: ``unknown_alias``, ``own``, ``repeated_target`` (the
    first counts) and ``empty``."""


CallFailure = Literal["malformed", "unknown_tool", "bad_arguments", "raised", "timeout", "memory", "crashed"]
"""Reasons for which a tool gave no value: the call cannot be read, names no tool of the round, or its arguments are not
those of the function; the function raised, took too long or too much memory, or its process ended."""


class ToolCall(Reply):
    """A call of a tool with what came back; the agent's turn goes on."""

    tool: str
    """Its name as written; empty in a call that cannot be read."""
    arguments: str
    """As JSON."""
    output: str
    """The value as text, or the error."""
    failure: CallFailure | None = None
    stop: int
    """End of the call in the text of the turn, in characters."""


class ReplyStatus(StrEnum):
    """Result of reading a reply. Compare with ``is``; every member is truthy."""

    OK = "ok"
    """Exactly what was asked for, and nothing else."""
    REPAIRED = "repaired"
    """The requested content, found among other things or in part."""
    UNSTRUCTURED = "unstructured"
    """Nothing of what was asked for was found; a solution is then the whole text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One reply of one agent."""

    __pydantic_config__: ClassVar[ConfigDict] = _STORED

    agent_id: int
    round_index: int
    segment: str = "turn"
    """Name of the protocol's segment that was asked for."""
    lane: int = 0
    """Index among the parallel generations of its round."""
    prompt: str
    """The user message this agent answered (without the chat template); of a vote without words, all it was asked."""
    text: str
    """The reply as decoded, without end-of-turn token and thinking."""
    response: Annotated[Reply, PlainSerializer(lambda reply: reply.model_dump())]
    """As it was read; stored with all its fields, whatever kind of reply it is."""
    status: ReplyStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Early end of an agent, with the reason."""

    __pydantic_config__: ClassVar[ConfigDict] = _STORED

    agent_id: int
    round_index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A whole conversation, turns in order of (round, agent, lane)."""

    question: str
    num_agents: int
    max_rounds: int
    turns: tuple[Turn, ...]
    failures: tuple[Failure, ...] = ()
    answer: str | None = None
    """The known answer, where a reward of the user's may look at it."""

    @property
    def finished(self) -> tuple[int, ...]:
        """Ids of the agents that finished."""
        failed = {failure.agent_id for failure in self.failures}
        return tuple(each for each in range(self.num_agents) if each not in failed)

    @property
    def first_solutions(self) -> dict[int, str]:
        """First solution of every agent that gave one, by agent id."""
        found: dict[int, str] = {}
        for turn in self.turns:
            if isinstance(turn.response, Solution):
                found.setdefault(turn.agent_id, turn.response.solution)
        return found

    @property
    def final_solutions(self) -> dict[int, str]:
        """Last solution of every agent that did not fail, by agent id."""
        finished = set(self.finished)
        return {
            turn.agent_id: turn.response.solution
            for turn in self.turns
            if isinstance(turn.response, Solution) and turn.agent_id in finished
        }

    def sampled_turns(self, agent_id: int, lane: int) -> list[Turn]:
        """The turns of one seat that the policy wrote, in order: one for each transition of its trajectory."""
        return [
            turn
            for turn in self.turns
            if (turn.agent_id, turn.lane) == (agent_id, lane) and turn.response.is_sampled
        ]

    def solutions(self, segment: str) -> dict[int, str]:
        """Last solution in a segment by agent id, also of agents that failed later."""
        return {
            turn.agent_id: turn.response.solution
            for turn in self.turns
            if turn.segment == segment and isinstance(turn.response, Solution)
        }
