"""The pupil whose writing the built-in policy learns from: its attempts at a problem, and one piece of its text."""

import random
from dataclasses import dataclass

from tinker_cookbook.renderers.base import Message

from viva.tiny.tasks import Problem, worked_solution, wrong_solution

__all__ = ["Attempt", "Example", "critic_attempt", "make_attempt"]

_SURE_OF_PLAIN_STEPS = 0.6
_SURE_OF_HARD_STEPS = 0.36
_SURE_AS_CRITIC = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One piece of training text."""

    messages: tuple[Message, ...]
    parts: tuple[tuple[str, float], ...]
    """The reply in parts, each with its weight in the loss; parts meet where tokens meet."""

    @property
    def reply(self) -> str:
        """The whole reply."""
        return "".join(text for text, _ in self.parts)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A solution, and whether it is right."""

    solution: str
    right: bool


def _is_hard(problem: Problem) -> bool:
    def carries(left: int, operator: str, right: int) -> bool:
        return left % 10 + right % 10 >= 10 if operator == "+" else left % 10 < right % 10

    return any(
        carries(step.left, step.operator, step.right) for step in problem.steps if step.operator != "x"
    )


def make_attempt(problem: Problem, rng: random.Random, *, sure: float | None = None) -> Attempt:
    """An attempt that is right with probability `sure`; by default it depends on carries and borrows."""
    if sure is None:
        sure = _SURE_OF_HARD_STEPS if _is_hard(problem) else _SURE_OF_PLAIN_STEPS
    if rng.random() < sure:
        return Attempt(worked_solution(problem), True)
    return Attempt(wrong_solution(problem, rng), False)


def critic_attempt(problem: Problem, rng: random.Random) -> Attempt:
    """The attempt of one who looks at others' solutions: more careful than with its own."""
    return make_attempt(problem, rng, sure=_SURE_AS_CRITIC)
