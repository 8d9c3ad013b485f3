"""The record of a conversation: what was said, how it was judged and what it earned.

The same classes write a line of ``transcripts.jsonl`` and read it; what older files lack has defaults. They stand
above `viva.conversation`, since replies can be rankings, and import nothing heavy, so that a page can list thousands.
"""

import math
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from viva.conversation.records import (
    AgentResponse,
    Conversation,
    CritiqueReply,
    Failure,
    Reply,
    ReplyStatus,
    Revision,
    Solution,
    ToolCall,
    Turn,
)
from viva.judging.ballots import Vote
from viva.judging.ranking import LabelBallot, RankingReply
from viva.judging.reasoning_gym import plain_answer

_Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]


def _with_reply(turn: Any) -> Any:
    """A stored turn with its reply as the kind that has the stored fields."""
    if not isinstance(turn, dict) or not isinstance(turn.get("response"), dict):
        return turn
    read = _StoredReply.model_validate({"response": turn["response"]})
    return {"prompt": "", "text": "", "status": ReplyStatus.OK, **turn, "response": read.response}


def _reply_of(value: dict[str, Any]) -> Reply:
    if value.get("answers") is not None:
        return LabelBallot.model_validate({"dropped": {}, "preferences": (), **value})
    if value.get("preferences") is not None:
        return RankingReply.model_validate({"dropped": {}, **value})
    if value.get("critiques") is not None:
        return CritiqueReply.model_validate({"dropped": {}, **value})
    if value.get("tool") is not None:
        return ToolCall.model_validate(value)
    if "solution" not in value:  # a kind of the user's own
        return Reply()
    if value.get("decision"):
        return Revision.model_validate(value)
    has_thoughts = "reflection" in value or "evaluation" in value
    return (AgentResponse if has_thoughts else Solution).model_validate(value)


class _StoredReply(BaseModel):
    """A reply under the name of its field, which errors then tell."""

    response: Annotated[Reply, BeforeValidator(_reply_of)]


class _StoredRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")  # what a reward adds is kept


class ComparisonRecord(_StoredRecord):
    """One judged pair: ``first`` was shown as A, ``second`` as B."""

    agent_id: int | None = None
    """The agent whose initial (0) and revised (1) solutions were compared; ``None`` if the pair is two agents."""
    first: int
    second: int
    outcome: str
    score: float | None = None
    text: str = ""
    prompt: str = ""
    """The judge's; empty in older files."""
    probabilities: tuple[float, float, float] | None = None
    """p(A), p(B), p(Tie)."""
    off_set_mass: float | None = None
    was_asked: bool = True
    failure: str | None = None
    """Reason why the judge gave no reply."""


class JudgeRecord(_StoredRecord):
    """The messages that stand around every comparison's prompt."""

    system_prompt: str = ""
    prefill: str = ""
    """The beginning of the judge's reply, where it is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One criterion that an answer fulfils or does not.

    Raises:
        ValueError: If it has no text, or its weight is not above 0.
    """

    text: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError(f"a criterion needs a text; got {self.text!r}")
        if not math.isfinite(self.weight) or self.weight <= 0:
            raise ValueError(
                f"the criterion {self.text!r} needs a weight above 0, or none; got {self.weight}"
            )


class DealtRecord(_StoredRecord):
    """A critique that an agent was shown in a round, by critic and by the agent that it was written for."""

    round_index: int
    reader: int
    critic: int
    target: int
    text: str


class ControlRecord(_StoredRecord):
    """A control's change of a conversation, see `viva.selfplay.controls`."""

    name: str
    question: str | None = None
    """Problem of the conversation whose critiques were read; ``None`` if they were this one's, or no other had any."""
    shown: tuple[DealtRecord, ...] = ()
    """All critiques that were read, where they are not those that were written for their readers."""


class ScoresRecord(_StoredRecord):
    """Scores of the solutions before and after revision, in [0, 1], with standard errors; all by agent id."""

    initial: dict[int, float] = {}
    final: dict[int, float] = {}
    initial_error: dict[int, float] = {}
    final_error: dict[int, float] = {}


class ConversationRecord(_StoredRecord):
    """A whole conversation with its judgement."""

    question: str
    answer: str | None = None
    protocol: str = ""
    """The kind of conversation; empty in older files."""
    system_prompt: str = ""
    """The system message before every turn's prompt; empty in older files."""
    num_agents: int = 0
    max_rounds: int = 0
    order: str = ""
    """``sequential`` or ``simultaneous``: whether agents see what was said before them in their own round."""
    control: ControlRecord | None = None
    """``None``: the whole conversation was held."""
    judge: JudgeRecord | None = None
    """``None`` where no judge was asked, and in older files."""
    turns: tuple[Annotated[Turn, BeforeValidator(_with_reply)], ...] = ()
    failures: tuple[Failure, ...] = ()
    comparisons: tuple[ComparisonRecord, ...] = ()
    initial_judge_comparisons: tuple[ComparisonRecord, ...] = ()
    """Comparisons of final solutions by the policy as it was at the start, which pay nothing."""
    gains: dict[int, dict[int, _Number]] | None = None
    """By informant and target, where a scorer was asked: see `viva.judging.scorer.Scorer.gains`."""
    judge_answer: str | None = None
    """The judge's own answer, where it was asked for one."""
    criteria: tuple[Criterion, ...] = ()
    """Criteria of a rubric, where a judge was asked about them."""
    rubric: dict[int, tuple[float | None, ...]] | None = None
    """The judge's scores by agent, in the order of the criteria; ``None``: a reply that could not be read."""
    logprobs: dict[int, tuple[_Number, ...]] | None = Field(default=None, exclude=True)
    """Sampling logprobs in nats of the replies that give final solutions, by agent. No transcript holds them: they
    are read from the tokens of the conversation, where the run kept them."""
    rules: dict[str, object] = {}
    """Rules that made rewards of votes, where there is more than one way."""
    scores: ScoresRecord = ScoresRecord()
    streams: dict[int, dict[str, float | None]] = {}
    """Reward of every stream by agent id; ``None`` where an agent earned nothing that can be measured."""
    rewards: dict[int, _Number] = {}
    """By agent id."""
    correct: dict[int, bool] | None = None
    """By agent id; ``None`` if the question has no known answer."""
    correct_initial: dict[int, bool] | None = None
    """Rightness of the solutions before revision, where there are such."""

    @classmethod
    def of(cls, conversation: Conversation, **fields: Any) -> Self:
        """The record of a conversation, and of all else that is known of it."""
        return cls(
            question=conversation.question,
            num_agents=conversation.num_agents,
            max_rounds=conversation.max_rounds,
            turns=conversation.turns,
            failures=conversation.failures,
            **fields,
        )

    def conversation(self) -> Conversation:
        """The conversation without its judgement, as a reward of the user's gets it, with the plain answer."""
        return Conversation(
            question=self.question,
            num_agents=self.num_agents,
            max_rounds=self.max_rounds,
            turns=self.turns,
            failures=self.failures,
            answer=None if self.answer is None else plain_answer(self.answer),
        )

    def __str__(self) -> str:
        """The conversation as a person reads it."""
        lines = [f"Problem: {self.question}"]
        for turn in self.turns:
            lines += ["", f"[round {turn.round_index + 1}, agent {turn.agent_id}, {turn.segment}]", turn.text]
            if isinstance(turn.response, ToolCall):
                lines += [f"[{turn.response.failure or 'returned'}]", turn.response.output]
        for failure in self.failures:
            lines += [
                "",
                f"agent {failure.agent_id} left in round {failure.round_index + 1}: {failure.reason}",
            ]
        rewards = ", ".join(f"agent {agent_id} {reward:+.3f}" for agent_id, reward in self.rewards.items())
        lines += ["", f"rewards: {rewards or 'none'}"]
        if self.answer is not None:
            right = [str(agent_id) for agent_id, is_right in (self.correct or {}).items() if is_right]
            lines.append(f"known answer: {self.answer}; right: {', '.join(right) or 'nobody'}")
        return "\n".join(lines)

    def show(self) -> None:
        """Print the conversation."""
        sys.stdout.write(f"{self}\n")

    def fields(self) -> dict[str, object]:
        """The record's fields by name: a reward adds to them before it is a record again."""
        return {name: getattr(self, name) for name in self.model_fields_set}

    @property
    def agent_ids(self) -> list[int]:
        """Agents that left any trace, in order."""
        seen = {turn.agent_id for turn in self.turns} | {failure.agent_id for failure in self.failures}
        return sorted(seen | set(self.rewards) | set(self.correct or {}))

    def said(self) -> list[tuple[int | None, int, int, str]]:
        """(agent or ``None``, shown first, shown second, outcome) of every comparison."""
        return [(item.agent_id, item.first, item.second, item.outcome) for item in self.comparisons]

    def ballots(self) -> dict[str, dict[int, list[Vote]]]:
        """Votes of all rankings, by segment and voter."""
        found: dict[str, dict[int, list[Vote]]] = {}
        for turn in self.turns:
            if isinstance(turn.response, RankingReply) and turn.response.preferences:
                own = found.setdefault(turn.segment, {}).setdefault(turn.agent_id, [])
                own.extend(turn.response.preferences)
        return found


class Transcript(_StoredRecord):
    """One group of a training step: a line of ``transcripts.jsonl``."""

    step: int
    group: int
    void: bool = False
    void_reason: str | None = None
    failures: tuple[Any, ...] = ()
    """Failures of the attempts to play it."""
    strategy: str | None = None
    tags: tuple[str, ...] = ()
    rewards: tuple[_Number | None, ...] | None = None
    """By seat; ``None`` for one that earned none, where earlier versions wrote 0.0. A void group has none at all."""
    record: ConversationRecord | None = None
    """``None`` if the environment keeps no record of its conversations."""

    @classmethod
    def parse(cls, where: str, row: dict[str, object]) -> Self:
        """The transcript in a line that was read as JSON; a ValueError with the place ``where`` if it is none."""
        try:
            return cls.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{where}: not a transcript: {field}: {first['msg']}") from error


def ballots_by_segment(conversation: Conversation) -> dict[str, dict[int, tuple[Vote, ...]]]:
    """Votes of all rankings by segment and voter; a ballot that could not be read is empty."""
    found: dict[str, dict[int, tuple[Vote, ...]]] = {}
    for turn in conversation.turns:
        if isinstance(turn.response, RankingReply):
            found.setdefault(turn.segment, {})[turn.agent_id] = turn.response.preferences
    return found
