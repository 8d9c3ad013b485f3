"""What the report reads of a line of ``transcripts.jsonl``, with defaults for what an older file may lack."""

from pydantic import BaseModel, ConfigDict

__all__ = [
    "RecordedComparison",
    "RecordedConversation",
    "RecordedFailure",
    "RecordedReply",
    "RecordedTurn",
    "Transcript",
]


class _Recorded(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class RecordedReply(_Recorded):
    """The fields of a structured reply."""

    reflection: str = ""
    evaluation: str = ""
    solution: str = ""


class RecordedTurn(_Recorded):
    """One reply of one agent."""

    agent_id: int
    round_index: int
    prompt: str = ""
    text: str = ""
    response: RecordedReply
    status: str = "ok"


class RecordedFailure(_Recorded):
    """Why an agent left the conversation."""

    agent_id: int
    round_index: int
    reason: str


class RecordedComparison(_Recorded):
    """One judged pair: ``first`` was shown as A, ``second`` as B."""

    first: int
    second: int
    outcome: str
    score: float | None = None
    text: str = ""
    probabilities: tuple[float, float, float] | None = None
    """p(A), p(B), p(Tie)."""


class RecordedConversation(_Recorded):
    """A whole conversation with its judgement."""

    question: str
    answer: str | None = None
    turns: tuple[RecordedTurn, ...] = ()
    failures: tuple[RecordedFailure, ...] = ()
    comparisons: tuple[RecordedComparison, ...] = ()
    rewards: dict[int, float] = {}
    """By agent id."""
    correct: dict[int, bool] | None = None
    """By agent id; ``None`` if the question has no known answer."""

    @property
    def agent_ids(self) -> list[int]:
        """Agents that left any trace, in order."""
        seen = {turn.agent_id for turn in self.turns} | {failure.agent_id for failure in self.failures}
        return sorted(seen | set(self.rewards) | set(self.correct or {}))

    @property
    def share_correct(self) -> float | None:
        """Share of agents whose final solution is right; ``None`` if nobody was graded."""
        return sum(self.correct.values()) / len(self.correct) if self.correct else None

    @property
    def reward_spread(self) -> float:
        """Highest minus lowest reward: how clearly the judge decided."""
        return max(self.rewards.values()) - min(self.rewards.values()) if self.rewards else 0.0


class Transcript(_Recorded):
    """One group of a training step."""

    step: int
    group: int
    void: bool = False
    void_reason: str | None = None
    tags: tuple[str, ...] = ()
    record: RecordedConversation | None = None
    """``None`` if the environment keeps no record of its conversations."""
