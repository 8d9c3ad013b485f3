"""What an evaluation keeps of every problem: frozen values that are written to JSON and read back.

All figures are computed from these (`viva.eval.figures`), so a stored evaluation can be compared with another one
without sampling anything again.
"""

from dataclasses import dataclass
from typing import Any

__all__ = ["WRONG", "AgentAnswers", "Answer", "Asked", "Difference", "Evaluation", "Figure", "Played"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer to one problem."""

    right: bool
    """Finished, read, and met by the check; everything else is wrong."""
    vote: str | None
    """What it says, for counting; ``None`` if it is cut off or says nothing."""
    finished: bool
    """Whether the policy ended it."""
    num_tokens: int
    """Sampled for it."""
    text: str


WRONG = Answer(right=False, vote=None, finished=False, num_tokens=0, text="")
"""The answer that was not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One problem that was asked directly."""

    question: str
    answer: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAnswers:
    """What one agent of a conversation answered at first and in the end."""

    first: Answer
    final: Answer
    score: float | None
    """What the conversation itself made of the final answer; ``None`` if the agent failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One problem that was talked about."""

    question: str
    answer: str
    agents: tuple[AgentAnswers, ...]
    """All that there should be: an agent that failed is wrong, and so are all of a void conversation."""
    num_tokens: int
    """All that was sampled: every reply of every agent, attempts that were thrown away, and the judge's."""
    num_judge_tokens: int
    """The judge's share of them."""
    void_reason: str | None = None
    direct: tuple[Answer, ...] = ()
    """Direct answers to the same problem that together took at most as many tokens, and at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number with its interval."""

    value: float | None
    """``None`` if there is nothing to compute it from."""
    low: float | None
    """Of the 95 % interval; ``None`` where resampling says nothing, see `viva.eval.bootstrap`."""
    high: float | None
    num_problems: int
    """Problems that contribute to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One number of two evaluations of the same problems."""

    value: float | None
    """Of the first."""
    against: float | None
    """Of the second."""
    difference: float | None
    """First less second."""
    low: float | None
    """Of the 95 % interval of the difference, by resampling problems, the same ones for both."""
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Everything that was found out about one policy."""

    target: dict[str, Any]
    """Which policy: name, kind, model, checkpoint, next_step."""
    options: dict[str, Any]
    """How it was evaluated: all that decides what is sampled and how it is graded."""
    prompts_digest: str
    """Of the problems, see `viva.training.prompts.prompts_digest`."""
    problems: str = ""
    """How many problems, and where they are from; empty in files of earlier versions."""
    asked: tuple[Asked, ...] = ()
    played: dict[str, tuple[Played, ...]]
    """By kind of conversation."""
    metrics: dict[str, dict[str, float]]
    """By kind, the metrics that the training loop reports under ``test/``, of the same samples."""
    figures: dict[str, Figure]
