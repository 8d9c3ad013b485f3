"""Text of critique self-play: proposals, rankings, critiques, revisions, in the words of its prompts.

The pupil sees most slips of others (`_TRUE_MARK`), follows critique mostly (`_FOLLOWS`) and repairs most of what it
was told to repair (`_REPAIRS`). So arguing helps, and leaves something to learn in every role.

There are two forms. In the short one, remarks are a mere right or wrong: a small model learns the format, and how to
revise, but not to judge. In the reasoned one it works the problem out first, names each answer and says whether it is
the same, which it can learn; the last phase of the build replaces the one by the other.
"""

import random

from tinker_cookbook.renderers.base import Message

from viva.conversation.prompts import persona
from viva.selfplay.critique_prompts import (
    CRITIQUE_PERSONAS,
    critique_instruction,
    critique_messages,
    proposal_instruction,
    ranking_instruction,
    revision_instruction,
    shown,
)
from viva.tiny.attempts import Attempt, Example, make_attempt, missing_step
from viva.tiny.tasks import Problem, sample_problem

__all__ = [
    "comparison_drill_example",
    "critique_example",
    "proposal_example",
    "ranking_example",
    "reasoned_critique_example",
    "reasoned_ranking_example",
    "reasoned_revision_example",
    "remark",
    "revision_example",
]

_TRUE_MARK = 0.85
_FOLLOWS = 0.85
_REPAIRS = 0.85
_MARK_WEIGHT = 6.0
_REASONED_MARK_WEIGHT = 5.0
_CONCLUSION = " The answer is "
_LETTERS = "ABCDEFGH"


def _persona(rng: random.Random) -> str:
    return persona(rng.randrange(len(CRITIQUE_PERSONAS)), CRITIQUE_PERSONAS)


def proposal_example(rng: random.Random) -> Example:
    """Round 0: a worked answer, right or wrong."""
    problem = sample_problem(rng, "train")
    messages = critique_messages(problem.question, [], proposal_instruction(_persona(rng)))
    return Example(messages=tuple(messages), parts=((make_attempt(problem, rng).solution, 1.0),))


def _shown_attempts(problem: Problem, rng: random.Random) -> tuple[dict[str, Attempt], list[str]]:
    """Attempts by letter, half of them right, and the prompt's blocks that show them."""
    count = rng.choice((2, 3, 4, 4, 4))
    attempts = {letter: make_attempt(problem, rng, sure=0.5) for letter in _LETTERS[:count]}
    return attempts, [shown(f"Solution {letter}", attempt.solution) for letter, attempt in attempts.items()]


def ranking_example(rng: random.Random, *, reasoned: bool = False) -> Example:
    """Rounds 1 and 3: a mark for each solution, and the ranking that follows from the marks."""
    problem = sample_problem(rng, "train")
    attempts, blocks = _shown_attempts(problem, rng)
    own = rng.choice(list(attempts))
    votes_on_own = len(attempts) == 2
    closing = ranking_instruction(_persona(rng), own, votes_on_own=votes_on_own)
    ranked = [letter for letter in attempts if votes_on_own or letter != own]
    messages = tuple(critique_messages(problem.question, blocks, closing))
    if reasoned:
        own_way = make_attempt(problem, rng, sure=_TRUE_MARK)
        marks = {letter: _answer(attempts[letter]) == _answer(own_way) for letter in ranked}
        names = {letter: f" {letter} {_answer(attempts[letter])}" for letter in ranked}
        opening = (_working(own_way), 1.0)
        return Example(messages=messages, parts=(opening, *_marked(marks, names, _REASONED_MARK_WEIGHT)))
    marks = {letter: attempts[letter].right == (rng.random() < _TRUE_MARK) for letter in ranked}
    names = {letter: f" {letter}" if place else letter for place, letter in enumerate(ranked)}
    return Example(messages=messages, parts=tuple(_marked(marks, names, _MARK_WEIGHT)))


def reasoned_ranking_example(rng: random.Random) -> Example:
    """The same after working the problem out."""
    return ranking_example(rng, reasoned=True)


def _marked(marks: dict[str, bool], names: dict[str, str], weight: float) -> list[tuple[str, float]]:
    """A mark for each letter and the ranking that follows."""
    parts: list[tuple[str, float]] = []
    for letter, good in marks.items():
        parts += [
            (f"{names[letter]} is", 1.0),
            (" right" if good else " wrong", weight),
            (".", 1.0),
        ]
    tiers = [" = ".join(letter for letter in marks if marks[letter] is good) for good in (True, False)]
    return [*parts, (f"\nRanking: {' > '.join(tier for tier in tiers if tier)}", 1.0)]


def comparison_drill_example(rng: random.Random) -> Example:
    """A working and twenty answers, each marked. Only the marks are learned."""
    problem = sample_problem(rng, "train")
    own_way = make_attempt(problem, rng, sure=_TRUE_MARK)
    parts = [(_working(own_way), 0.0)]
    for _ in range(20):
        other = own_way if rng.random() < 0.5 else make_attempt(problem, rng, sure=0.3)
        mark = " right" if _answer(other) == _answer(own_way) else " wrong"
        parts += [(f" {rng.choice(_LETTERS[:4])} {_answer(other)} is", 0.0), (mark, 1.0), (".", 0.0)]
    message = Message(role="user", content="Compare answers.")
    return Example(messages=(message,), parts=tuple(parts))


def _working(attempt: Attempt) -> str:
    return attempt.solution.partition(_CONCLUSION)[0]


def _answer(attempt: Attempt) -> str:
    return attempt.solution.partition(_CONCLUSION)[2].removesuffix(".")


def remark(problem: Problem, attempt: Attempt, rng: random.Random) -> list[tuple[str, float]]:
    """What the pupil says of an attempt: right, or wrong and the step that mends it; sometimes mistaken."""
    says_right = attempt.right == (rng.random() < _TRUE_MARK)
    if says_right:
        return [(" right", _MARK_WEIGHT), (".", 1.0)]
    step = rng.choice(problem.steps) if attempt.right else missing_step(problem, attempt.solution)
    result = step.slip if attempt.right else step.result
    return [(" wrong", _MARK_WEIGHT), (f", {step.left}{step.operator}{step.right}={result}.", 1.0)]


def _reasoned_remark(own_way: Attempt, attempt: Attempt) -> list[tuple[str, float]]:
    mark = " right" if _answer(own_way) == _answer(attempt) else " wrong"
    saying = f" {_working(own_way)} {_answer(attempt)} is"
    return [(saying, 1.0), (mark, _REASONED_MARK_WEIGHT), (".", 1.0)]


def critique_example(rng: random.Random, *, reasoned: bool = False) -> Example:
    """Round 1: a remark on most of the other solutions."""
    problem = sample_problem(rng, "train")
    attempts, blocks = _shown_attempts(problem, rng)
    own = rng.choice(list(attempts))
    others = [letter for letter in attempts if letter != own]
    targets = [letter for letter in others if rng.random() < 0.85] or [rng.choice(others)]
    own_way = make_attempt(problem, rng, sure=_TRUE_MARK) if reasoned else None
    parts: list[tuple[str, float]] = []
    for letter in targets:
        newline, attempt = "\n" if parts else "", attempts[letter]
        said = remark(problem, attempt, rng) if own_way is None else _reasoned_remark(own_way, attempt)
        parts += [(f"{newline}Critique of {letter}:", 1.0), *said]
    closing = critique_instruction(_persona(rng), own)
    return Example(messages=tuple(critique_messages(problem.question, blocks, closing)), parts=tuple(parts))


def reasoned_critique_example(rng: random.Random) -> Example:
    """The same, every remark with the working that it rests on."""
    return critique_example(rng, reasoned=True)


def revision_example(rng: random.Random) -> Example:
    """Round 2: the solution after up to three remarks on it, revised or defended."""
    problem = sample_problem(rng, "train")
    own = make_attempt(problem, rng)
    remarks = [
        "".join(text for text, _ in remark(problem, own, rng)).strip() for _ in range(rng.randrange(4))
    ]
    blocks = [shown("Your solution", own.solution)]
    blocks += [shown("Critique of it", text) for text in remarks]
    objections = [text for text in remarks if text.startswith("wrong")]
    revises = rng.random() < _FOLLOWS if 2 * len(objections) >= max(len(remarks), 1) else rng.random() < 0.1
    after = own
    if revises:
        sure = (0.1 if own.right else _REPAIRS) if objections else None
        after = make_attempt(problem, rng, sure=sure)
    return Example(
        messages=tuple(critique_messages(problem.question, blocks, revision_instruction(_persona(rng)))),
        parts=(("Revise:" if revises else "Defend:", 4.0), (f" {after.solution}", 1.0)),
    )


def reasoned_revision_example(rng: random.Random) -> Example:
    """The same after reasoned remarks: the reviser mostly follows the majority, and takes over its working."""
    problem = sample_problem(rng, "train")
    own = make_attempt(problem, rng)
    ways = [make_attempt(problem, rng, sure=_TRUE_MARK) for _ in range(rng.randrange(4))]
    remarks = ["".join(text for text, _ in _reasoned_remark(way, own)).strip() for way in ways]
    blocks = [shown("Your solution", own.solution)]
    blocks += [shown("Critique of it", text) for text in remarks]
    objections = [way for way in ways if _answer(way) != _answer(own)]
    revises = rng.random() < _FOLLOWS if 2 * len(objections) >= max(len(remarks), 1) else rng.random() < 0.1
    after = own
    if revises:
        after = rng.choice(objections) if objections else make_attempt(problem, rng)
    return Example(
        messages=tuple(critique_messages(problem.question, blocks, revision_instruction(_persona(rng)))),
        parts=(("Revise:" if revises else "Defend:", 4.0), (f" {after.solution}", 1.0)),
    )
