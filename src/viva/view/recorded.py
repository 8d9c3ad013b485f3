"""Fields of ``transcripts.jsonl`` and ``tokens.jsonl`` that are read, with defaults for what older files lack."""

from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from viva.conversation.records import Critique
from viva.judging.ballots import Preference, Tie

__all__ = [
    "RecordedComparison",
    "RecordedConversation",
    "RecordedFailure",
    "RecordedJudge",
    "RecordedReply",
    "RecordedScores",
    "RecordedSpan",
    "RecordedTokenTurn",
    "RecordedTokens",
    "RecordedTurn",
    "Transcript",
]


_Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
_Column: TypeAlias = tuple[_Number | None, ...] | None


class _Recorded(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class RecordedReply(_Recorded):
    """What a reply was read into: the fields of all kinds of replies."""

    reflection: str = ""
    evaluation: str = ""
    solution: str = ""
    decision: str = ""
    """Of a revision: revise, defend or unstated."""
    preferences: tuple[Preference | Tie, ...] | None = None
    """Of a ranking; ``None`` if the reply is no ranking."""
    critiques: tuple[Critique, ...] | None = None
    """``None`` if the reply is no critique."""
    dropped: dict[str, int] = {}
    """Number of votes or critiques that do not count, by cause."""


class RecordedTurn(_Recorded):
    """One reply of one agent."""

    agent_id: int
    round_index: int
    segment: str = "turn"
    """What was asked for."""
    lane: int = 0
    """Which of the parallel replies of its round it is."""
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

    agent_id: int | None = None
    """Whose two solutions were compared, 0 the initial and 1 the revised one; ``None`` if the pair is two agents."""
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


class RecordedJudge(_Recorded):
    """The messages that stand around every comparison's prompt."""

    system_prompt: str = ""
    prefill: str = ""
    """The beginning of the judge's reply, where it is given."""


class RecordedScores(_Recorded):
    """Scores of the solutions before and after revision, in [0, 1], with standard errors; all by agent id."""

    initial: dict[int, float] = {}
    final: dict[int, float] = {}
    initial_error: dict[int, float] = {}
    final_error: dict[int, float] = {}


class RecordedConversation(_Recorded):
    """A whole conversation with its judgement."""

    question: str
    protocol: str = ""
    """What kind of conversation it is; empty in older files."""
    system_prompt: str = ""
    """The system message before every turn's prompt; empty in older files."""
    judge: RecordedJudge | None = None
    """``None`` where no judge was asked, and in older files."""
    order: str = ""
    """``sequential`` or ``simultaneous``: whether agents see what was said before them in their own round."""
    num_agents: int = 0
    max_rounds: int = 0
    answer: str | None = None
    turns: tuple[RecordedTurn, ...] = ()
    failures: tuple[RecordedFailure, ...] = ()
    comparisons: tuple[RecordedComparison, ...] = ()
    rules: dict[str, Any] = {}
    """How votes became rewards, where there is more than one way."""
    scores: RecordedScores = RecordedScores()
    streams: dict[int, dict[str, float | None]] = {}
    """Reward of every stream by agent id; ``None`` where an agent earned nothing that can be measured."""
    rewards: dict[int, float] = {}
    """By agent id."""
    correct: dict[int, bool] | None = None
    """By agent id; ``None`` if the question has no known answer."""
    correct_initial: dict[int, bool] | None = None
    """Of the solutions before revision, where there are such."""

    @property
    def agent_ids(self) -> list[int]:
        """Agents that left any trace, in order."""
        seen = {turn.agent_id for turn in self.turns} | {failure.agent_id for failure in self.failures}
        return sorted(seen | set(self.rewards) | set(self.correct or {}))


class RecordedSpan(_Recorded):
    """Tokens of a turn that earned one reward."""

    start: int
    stop: int
    stream: str
    reward: _Number | None = None


class RecordedTokenTurn(_Recorded):
    """Kept tokens of one turn, with one value for each in every list; see `viva.training.records`."""

    seat: Annotated[int, Field(ge=0)]
    turn: Annotated[int, Field(ge=0)]
    ids: tuple[int, ...]
    pieces: tuple[str, ...] | None = None
    sampling: _Column = None
    training: _Column = None
    anchor: _Column = None
    weights: _Column = None
    mask: tuple[int | None, ...] | None = None
    advantages: _Column = None
    spans: tuple[RecordedSpan, ...] = ()
    sampled_in: str | None = None
    trained_in: str | None = None


class RecordedTokens(_Recorded):
    """One line of ``tokens.jsonl``."""

    strategy: str | None = None
    turns: tuple[RecordedTokenTurn, ...] = ()


class Transcript(_Recorded):
    """One group of a training step."""

    step: int
    group: int
    void: bool = False
    void_reason: str | None = None
    tags: tuple[str, ...] = ()
    record: RecordedConversation | None = None
    """``None`` if the environment keeps no record of its conversations."""
