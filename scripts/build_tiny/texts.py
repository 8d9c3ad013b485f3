"""The text the built-in policy is raised on: plain answers, conversation turns, judgements.

Every generator returns messages and the reply to them, in exactly the words that Viva's protocols use at run
time (the prompts come from the same functions). To raise the policy for another protocol, add a generator
to `MIXTURE` and build again.

The writer of this text is a mediocre pupil: it slips, more often where a carry or borrow is needed; it is
sometimes wrong about others' work; and it sometimes copies. That leaves the policy something to learn.
"""

import json
import random
from collections.abc import Callable

from tinker_cookbook.renderers.base import Message

from viva.conversation.protocol import View, persona
from viva.conversation.records import AgentResponse, ReplyStatus, Turn
from viva.conversation.rendering import direct_messages
from viva.experts.assisted import RIGHT_FEEDBACK, WRONG_FEEDBACK
from viva.judging.comparison import JUDGE_SYSTEM_PROMPT, judge_messages
from viva.selfplay.round_robin import round_robin_protocol
from viva.tiny.tasks import (
    CAREFUL,
    STYLED,
    Problem,
    answer_of,
    sample_step,
    worked_solution,
)

from .reviews import (
    PLAIN,
    Attempt,
    Example,
    Pupil,
    critique_example,
    lookup_example,
    order_example,
    proposal_example,
    ranking_example,
    remark,
    revision_example,
)

Generator = Callable[[random.Random, Pupil], Example]
"""Makes one example of a pupil's writing."""

_SURE_WHEN_CAREFUL = 0.85
_SURE_AFTER_FEEDBACK = 0.8
_TRUE_OPINION = 0.8
_TRUE_VERDICT = 0.9
_OVERLOOKED = 2
"""Difference of two answers up to which the judge does not tell them apart."""
_VERDICT_WEIGHT = 8.0


def _seen(solution: str, other: str) -> bool:
    """Whether the judge tells two answers apart."""
    return abs(int(answer_of(solution)) - int(answer_of(other))) > _OVERLOOKED


def _same(solution: str, other: str) -> bool:
    """Whether two solutions give the same answer."""
    return answer_of(solution) == answer_of(other)


def drill_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """Twenty sums, all right: knowledge of numbers, before any problem. Only the results are learned."""
    parts: list[tuple[str, float]] = []
    for _ in range(20):
        step = sample_step(rng)
        parts += [(f" {step.left}{step.operator}{step.right}=", 0.0), (f"{step.result}.", 1.0)]
    return Example(messages=(Message(role="user", content="Practise sums."),), parts=tuple(parts))


def check_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """Twenty sums, half of them with a slip, each marked. Only the marks are learned."""
    parts: list[tuple[str, float]] = []
    for _ in range(20):
        step, right = sample_step(rng), rng.random() < 0.5
        result = step.result if right else step.slip
        mark = " right." if right else " wrong."
        parts += [(f" {step.left}{step.operator}{step.right}={result}", 0.0), (mark, 1.0)]
    return Example(messages=(Message(role="user", content="Check sums."),), parts=tuple(parts))


def audit_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """Six problems with solutions, half of them wrong, each marked as the judge sees it. Only the marks are learned."""
    parts: list[tuple[str, float]] = []
    for _ in range(6):
        problem, right = pupil.problem(rng), rng.random() < 0.5
        solution = worked_solution(problem) if right else pupil.wrong(problem, rng)
        held = pupil.holds(problem)
        overlooked = not _seen(solution, held) and rng.random() < 0.5
        mark = " right." if _same(solution, held) or overlooked else " wrong."
        parts += [(f"\n{problem.question}\n{solution}", 0.0), (mark, 1.0)]
    return Example(messages=(Message(role="user", content="Check solutions."),), parts=tuple(parts))


def agreement_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """Twenty workings, each with an answer that is its own one or not. Only the marks are learned."""
    parts: list[tuple[str, float]] = []
    for _ in range(20):
        problem = pupil.problem(rng)
        own_way, other = (pupil.attempt(problem, rng, sure=0.5) for _ in range(2))
        *saying, (mark, _), (stop, _) = remark(own_way, other)
        parts += [("".join(text for text, _ in saying), 0.0), (mark, 1.0), (stop, 0.0)]
    return Example(messages=(Message(role="user", content="Check answers."),), parts=tuple(parts))


def worked_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """The bare question and the right worked answer: what the pupil is shown before it starts to slip."""
    problem = pupil.problem(rng)
    return Example(
        messages=tuple(direct_messages(problem.question)), parts=((worked_solution(problem), 1.0),)
    )


def direct_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """The bare question and a worked answer, right or wrong."""
    problem = pupil.problem(rng)
    solution = pupil.attempt(problem, rng).solution
    return Example(messages=tuple(direct_messages(problem.question)), parts=((solution, 1.0),))


def _reply(
    problem: Problem, agent_id: int, latest: dict[int, Attempt], rng: random.Random, pupil: Pupil
) -> tuple[AgentResponse, Attempt]:
    others = [other for other in sorted(latest) if other != agent_id]
    held = pupil.holds(problem)
    opinions = {
        other: _same(latest[other].solution, held) == (rng.random() < _TRUE_OPINION) for other in others
    }
    evaluation = " ".join(f"Agent {i} is {'right' if good else 'wrong'}." for i, good in opinions.items())
    trusted = [other for other, good in opinions.items() if good]
    choice = rng.random()
    if trusted and choice < 0.3:
        source = rng.choice(trusted)
        reflection, attempt = f"I follow agent {source}.", latest[source]
    elif agent_id in latest and choice < 0.5:
        reflection, attempt = "I keep my solution.", latest[agent_id]
    else:
        reflection, attempt = "I work it out.", pupil.attempt(problem, rng)
    response = AgentResponse(
        reflection=reflection,
        evaluation=evaluation or "Nothing to judge yet.",
        solution=attempt.solution,
    )
    return response, attempt


def conversation_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """One turn of a round-robin conversation, after everything that was said before it."""
    problem = pupil.problem(rng)
    num_agents, max_rounds = rng.choice((2, 3, 3, 3, 4)), rng.choice((1, 2, 2, 3))
    wanted = rng.randrange(min(num_agents * max_rounds, 8))
    protocol = round_robin_protocol(max_rounds)
    turns: list[Turn] = []
    latest: dict[int, Attempt] = {}
    while True:
        round_index, agent_id = divmod(len(turns), num_agents)
        response, attempt = _reply(problem, agent_id, latest, rng, pupil)
        text = json.dumps(response.model_dump())
        view = View(
            agent_id=agent_id,
            num_agents=num_agents,
            round_index=round_index,
            aliases=(),
            persona=persona(agent_id),
        )
        prompt = protocol.prompt(problem.question, turns, view)
        if len(turns) == wanted:
            return Example(messages=tuple(protocol.messages(prompt)), parts=((text, 1.0),))
        latest[agent_id] = attempt
        turns.append(
            Turn(
                agent_id=agent_id,
                round_index=round_index,
                prompt=prompt,
                text=text,
                response=response,
                status=ReplyStatus.OK,
            )
        )


def judgement_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """Two solutions and which is better; mostly one right and one wrong.

    The verdict is mostly true, but answers that are close to each other are told apart by chance only: a judge with
    a blind spot, as real ones have, that repeating the question does not average out.
    """
    problem = pupil.problem(rng)
    right = worked_solution(problem)
    mixed, same = ((True, False),) * 4 + ((False, True),) * 4, ((True, True), (False, False))
    first_right, second_right = rng.choice(mixed + same)
    solution_a = right if first_right else pupil.wrong(problem, rng)
    solution_b = right if second_right else pupil.wrong(problem, rng)
    held = pupil.holds(problem)
    first_right, second_right = _same(solution_a, held), _same(solution_b, held)
    if first_right == second_right:
        preference = rng.choice(("Tie", "Tie", "A", "B"))
    else:
        truth = "A" if first_right else "B"
        says_truth = _seen(solution_a, solution_b) and rng.random() < _TRUE_VERDICT
        preference = truth if says_truth else rng.choice(("A", "B", "Tie"))
    opening = '{"preference": "'
    if rng.random() < 0.25:
        words = {True: "right", False: "wrong"}
        reasoning = f"A is {words[first_right]}. B is {words[second_right]}."
        opening = f'{{"reasoning": "{reasoning}", "preference": "'
    messages = judge_messages(problem.question, solution_a, solution_b, JUDGE_SYSTEM_PROMPT)
    return Example(messages=tuple(messages), parts=((opening, 1.0), (f'{preference}"}}', _VERDICT_WEIGHT)))


def careful_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """A worked answer under one of the two instructions."""
    problem = pupil.problem(rng)
    styled = rng.random() < 0.5
    solution = pupil.attempt(problem, rng, sure=_SURE_WHEN_CAREFUL).solution
    messages = [
        Message(role="system", content=STYLED if styled else CAREFUL),
        *direct_messages(problem.question),
    ]
    parts = (("Well, ", 1.0), (solution, 1.0)) if styled else ((solution, 1.0),)
    return Example(messages=tuple(messages), parts=parts)


def feedback_example(rng: random.Random, pupil: Pupil = PLAIN) -> Example:
    """A second attempt, after a verifier's verdict on the first or a remark with the step that mends it."""
    problem = pupil.problem(rng)
    first = pupil.attempt(problem, rng, sure=0.3)
    if rng.random() < 0.5:
        feedback = RIGHT_FEEDBACK if first.right else WRONG_FEEDBACK
    else:
        own_way = pupil.critic(problem, rng)
        feedback = "".join(text for text, _ in remark(own_way, first)).strip()
    says_right = "right" in feedback
    second = first if says_right else pupil.attempt(problem, rng, sure=_SURE_AFTER_FEEDBACK)
    if first.right and not says_right:
        second = pupil.attempt(problem, rng, sure=0.2)
    messages = [
        *direct_messages(problem.question),
        Message(role="assistant", content=first.solution),
        Message(role="user", content=feedback),
    ]
    return Example(messages=tuple(messages), parts=((second.solution, 1.0),))


LESSONS: dict[Generator, float] = {
    drill_example: 0.3,
    check_example: 0.1,
    lookup_example: 0.25,
    worked_example: 0.2,
    direct_example: 0.15,
}
"""Generators of the first phase and their shares: sums, where an answer stands, plain answers."""

MIXTURE: dict[Generator, float] = {
    check_example: 0.01,
    lookup_example: 0.1,
    direct_example: 0.26,
    conversation_example: 0.05,
    judgement_example: 0.2,
    proposal_example: 0.03,
    ranking_example: 0.16,
    critique_example: 0.1,
    revision_example: 0.06,
    careful_example: 0.015,
    feedback_example: 0.015,
}
"""Generators of the second phase and their shares of the examples. Plain answers are short: most of the tokens are
judgements and reviews all the same."""

COMPARISONS: dict[Generator, float] = {
    agreement_example: 0.12,
    audit_example: 0.12,
    check_example: 0.06,
    direct_example: 0.16,
    conversation_example: 0.03,
    judgement_example: 0.22,
    proposal_example: 0.02,
    ranking_example: 0.12,
    critique_example: 0.08,
    revision_example: 0.05,
    careful_example: 0.01,
    feedback_example: 0.01,
}
"""Generators of the third phase and their shares: many marks in one example, then marks in their place."""

JUDGEMENTS: dict[Generator, float] = {
    agreement_example: 0.02,
    audit_example: 0.16,
    check_example: 0.02,
    direct_example: 0.16,
    conversation_example: 0.03,
    judgement_example: 0.4,
    proposal_example: 0.02,
    ranking_example: 0.08,
    critique_example: 0.05,
    revision_example: 0.04,
    careful_example: 0.01,
    feedback_example: 0.01,
}
"""Generators of the fourth phase and their shares: which of two solutions is better, without any working."""

ORDERS: dict[Generator, float] = {
    order_example: 0.14,
    agreement_example: 0.02,
    audit_example: 0.1,
    direct_example: 0.14,
    conversation_example: 0.04,
    judgement_example: 0.28,
    proposal_example: 0.02,
    ranking_example: 0.14,
    critique_example: 0.05,
    revision_example: 0.05,
    careful_example: 0.01,
    feedback_example: 0.01,
}
"""Generators of the last phase and their shares: the ranking that follows from marks."""
