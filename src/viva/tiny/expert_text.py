"""Text for expert iteration: answers under a helpful instruction, and second attempts after feedback."""

import random

from tinker_cookbook.renderers.base import Message

from viva.conversation.prompts import direct_messages
from viva.tiny.attempts import Example, critic_attempt, make_attempt
from viva.tiny.review_text import remark
from viva.tiny.tasks import sample_problem

__all__ = ["CAREFUL", "RIGHT_FEEDBACK", "STYLED", "WRONG_FEEDBACK", "careful_example", "feedback_example"]

CAREFUL = "Work slowly and check every step."
"""An instruction under which the pupil makes fewer slips."""

STYLED = f"{CAREFUL} Begin with the word Well."
"""The same with a habit of speech that has nothing to do with being right."""

RIGHT_FEEDBACK = "Your answer is right."
WRONG_FEEDBACK = "Your answer is wrong. Try again."
"""What a verifier says of a first attempt."""

_SURE_WHEN_CAREFUL = 0.85
_SURE_AFTER_FEEDBACK = 0.8


def careful_example(rng: random.Random) -> Example:
    """A worked answer under one of the two instructions."""
    problem = sample_problem(rng, "train")
    styled = rng.random() < 0.5
    solution = make_attempt(problem, rng, sure=_SURE_WHEN_CAREFUL).solution
    messages = [
        Message(role="system", content=STYLED if styled else CAREFUL),
        *direct_messages(problem.question),
    ]
    parts = (("Well, ", 1.0), (solution, 1.0)) if styled else ((solution, 1.0),)
    return Example(messages=tuple(messages), parts=parts)


def feedback_example(rng: random.Random) -> Example:
    """A second attempt, after a verifier's verdict on the first or a remark with the step that mends it."""
    problem = sample_problem(rng, "train")
    first = make_attempt(problem, rng, sure=0.3)
    if rng.random() < 0.5:
        feedback = RIGHT_FEEDBACK if first.right else WRONG_FEEDBACK
    else:
        own_way = critic_attempt(problem, rng)
        feedback = "".join(text for text, _ in remark(own_way, first)).strip()
    says_right = "right" in feedback
    second = first if says_right else make_attempt(problem, rng, sure=_SURE_AFTER_FEEDBACK)
    if first.right and not says_right:
        second = make_attempt(problem, rng, sure=0.2)
    messages = [
        *direct_messages(problem.question),
        Message(role="assistant", content=first.solution),
        Message(role="user", content=feedback),
    ]
    return Example(messages=tuple(messages), parts=((second.solution, 1.0),))
