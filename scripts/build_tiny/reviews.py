"""Attempts of the pupil whose writing the policy learns from, and text of critique self-play made of them.

Proposals, rankings, critiques and revisions are in the words of that protocol's prompts.

The pupil works the problem out first, names each answer and says whether it is its own one; it is more careful than
with its own solutions (`Pupil.critic`) and mostly follows critique (`_FOLLOWS`). So arguing helps,
and leaves something to learn in every role. A mere right or wrong, without the working, is not learned by a model of
this size.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tinker_cookbook.renderers.base import Message

from viva.conversation.critiques import (
    CRITIQUE_PERSONAS,
    critique_instruction,
    critique_messages,
    proposal_instruction,
    ranking_instruction,
    revision_instruction,
    shown,
)
from viva.conversation.protocol import View, persona, shown_solution
from viva.tiny.tasks import Problem, answer_of, sample_problem, worked_solution, working_of, wrong_solution

_SURE_OF_PLAIN_STEPS = 0.6
_SURE_OF_HARD_STEPS = 0.36
_SURE_AS_CRITIC = 0.9
_FOLLOWS = 0.85
_MARK_WEIGHT = 5.0
_ANSWER_WEIGHT = 3.0
_LETTERS = "ABCDEFGH"
_OPERATORS = {1: ">", 0: "=", -1: "<"}
_RANKING_WEIGHT = 2.0


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


class Pupil:
    """The writer of the text: how it solves problems, and what it holds right when it looks at others' solutions."""

    def problem(self, rng: random.Random) -> Problem:
        """A problem that it writes about."""
        return sample_problem(rng, "train")

    def attempt(self, problem: Problem, rng: random.Random, *, sure: float | None = None) -> Attempt:
        """An attempt that is right with probability `sure`; by default it depends on carries and borrows."""
        if sure is None:
            sure = _SURE_OF_HARD_STEPS if _is_hard(problem) else _SURE_OF_PLAIN_STEPS
        if rng.random() < sure:
            return Attempt(worked_solution(problem), True)
        return Attempt(self.wrong(problem, rng), False)

    def wrong(self, problem: Problem, rng: random.Random) -> str:
        """A wrong solution of its own."""
        return wrong_solution(problem, rng)

    def critic(self, problem: Problem, rng: random.Random) -> Attempt:
        """The attempt of one who looks at others' solutions: more careful than with its own."""
        return self.attempt(problem, rng, sure=_SURE_AS_CRITIC)

    def holds(self, problem: Problem) -> str:
        """The solution that it holds right as a judge."""
        return worked_solution(problem)


PLAIN = Pupil()
"""The pupil of the built-in policy."""


def _view(rng: random.Random, letters: Sequence[str] = (), own: str = "") -> View:
    """A place in a round whose agents go by the letters."""
    return View(
        agent_id=list(letters).index(own) if own else 0,
        num_agents=len(letters),
        round_index=0,
        aliases=tuple(range(len(letters))),
        persona=persona(rng.randrange(len(CRITIQUE_PERSONAS)), CRITIQUE_PERSONAS),
    )


def proposal_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """Round 0: a worked answer, right or wrong."""
    problem = pupil.problem(rng)
    messages = critique_messages(problem.question, [], proposal_instruction(_view(rng)))
    return Example(messages=tuple(messages), parts=((pupil.attempt(problem, rng).solution, 1.0),))


def _shown_attempts(
    problem: Problem, rng: random.Random, pupil: Pupil
) -> tuple[dict[str, Attempt], list[str]]:
    """Attempts by letter, half of them right, and the prompt's blocks that show them."""
    count = rng.choice((2, 3, 4, 4, 4))
    attempts = {letter: pupil.attempt(problem, rng, sure=0.5) for letter in _LETTERS[:count]}
    return attempts, [shown_solution(letter, attempt.solution) for letter, attempt in attempts.items()]


def ranking_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """Rounds 1 and 3: a working, a mark for each solution, and the ranking that follows from the marks."""
    problem = pupil.problem(rng)
    attempts, blocks = _shown_attempts(problem, rng, pupil)
    own = rng.choice(list(attempts))
    votes_on_own = len(attempts) == 2
    closing = ranking_instruction(_view(rng, list(attempts), own))
    ranked = [letter for letter in attempts if votes_on_own or letter != own]
    messages = tuple(critique_messages(problem.question, blocks, closing))
    own_way = pupil.critic(problem, rng)
    marks = {letter: answer_of(attempts[letter].solution) == answer_of(own_way.solution) for letter in ranked}
    parts: list[tuple[str, float]] = [(working_of(own_way.solution), 1.0)]
    for letter, good in marks.items():
        parts += [
            (f" {letter}", 1.0),
            (f" {answer_of(attempts[letter].solution)}", _ANSWER_WEIGHT),
            (" is", 1.0),
            (" right" if good else " wrong", _MARK_WEIGHT),
            (".", 1.0),
        ]
    parts += [(text, _RANKING_WEIGHT) for text, _ in _ranking_line(marks)]
    return Example(messages=messages, parts=tuple(parts))


def _ranking_line(marks: dict[str, bool]) -> list[tuple[str, bool]]:
    """The last line of a ranking in pieces, and which of them the marks decide."""
    pieces = [("\nRanking:", False)]
    for place, (first, second) in enumerate(itertools.combinations(marks, 2)):
        separator = "," if place else ""
        operator = _OPERATORS[marks[first] - marks[second]]
        pieces += [(f"{separator} {first}", False), (f" {operator}", True), (f" {second}", False)]
    return pieces


def order_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """Six sets of marks, each with the ranking that follows. Only what the marks decide is learned."""
    parts: list[tuple[str, float]] = []
    for _ in range(6):
        letters = sorted(rng.sample(_LETTERS[:4], rng.choice((2, 3, 3))))
        marks = {letter: rng.random() < 0.5 for letter in letters}
        answers = {True: rng.randint(2, 30), False: rng.randint(2, 30)}
        said = "".join(
            f" {letter} {answers[good]} is {'right' if good else 'wrong'}." for letter, good in marks.items()
        )
        parts.append((said, 0.0))
        parts += [(text, float(decided)) for text, decided in _ranking_line(marks)]
    return Example(messages=({"role": "user", "content": "Rank by marks."},), parts=tuple(parts))


def lookup_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """The answers under some letters, and nothing to work out: only the answers are learned."""
    problem = pupil.problem(rng)
    attempts, blocks = _shown_attempts(problem, rng, pupil)
    parts: list[tuple[str, float]] = []
    for letter in rng.choices(list(attempts), k=8):
        parts += [(f" {letter}", 0.0), (f" {answer_of(attempts[letter].solution)}", 1.0), (" is", 0.0)]
    return Example(
        messages=tuple(critique_messages(problem.question, blocks, "Name answers.")), parts=tuple(parts)
    )


def remark(own_way: Attempt, attempt: Attempt) -> list[tuple[str, float]]:
    """What a critic says of an attempt: its own working, and whether the answer is the same."""
    mark = " right" if answer_of(own_way.solution) == answer_of(attempt.solution) else " wrong"
    named = f" {answer_of(attempt.solution)}"
    working = f" {working_of(own_way.solution)}"
    return [(working, 1.0), (named, _ANSWER_WEIGHT), (" is", 1.0), (mark, _MARK_WEIGHT), (".", 1.0)]


def critique_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """Round 1: a remark on most of the other solutions."""
    problem = pupil.problem(rng)
    attempts, blocks = _shown_attempts(problem, rng, pupil)
    own = rng.choice(list(attempts))
    others = [letter for letter in attempts if letter != own]
    targets = [letter for letter in others if rng.random() < 0.85] or [rng.choice(others)]
    own_way = pupil.critic(problem, rng)
    parts: list[tuple[str, float]] = []
    for letter in targets:
        newline = "\n" if parts else ""
        parts += [(f"{newline}Critique of {letter}:", 1.0), *remark(own_way, attempts[letter])]
    closing = critique_instruction(_view(rng, list(attempts), own))
    return Example(messages=tuple(critique_messages(problem.question, blocks, closing)), parts=tuple(parts))


def revision_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """Round 2: the solution after up to three remarks; mostly the majority is followed and its working taken over."""
    problem = pupil.problem(rng)
    own = pupil.attempt(problem, rng)
    ways = [pupil.critic(problem, rng) for _ in range(rng.randrange(4))]
    remarks = ["".join(text for text, _ in remark(way, own)).strip() for way in ways]
    blocks = [shown("Your solution", own.solution)]
    blocks += [shown("Critique of it", text) for text in remarks]
    objections = [way for way in ways if answer_of(way.solution) != answer_of(own.solution)]
    revises = rng.random() < _FOLLOWS if 2 * len(objections) >= max(len(remarks), 1) else rng.random() < 0.1
    after = own
    if revises:
        after = rng.choice(objections) if objections else pupil.attempt(problem, rng)
    return Example(
        messages=tuple(critique_messages(problem.question, blocks, revision_instruction(_view(rng)))),
        parts=(("Revise:" if revises else "Defend:", 4.0), (f" {after.solution}", 1.0)),
    )
