"""Short arithmetic word problems: what the built-in policy was raised on and is trained on.

Every problem has an exact answer, a right worked solution, and worked solutions with a typical slip (a
forgotten carry or borrow, the wrong row of the times table, a forgotten second step). Problems are split by
their numbers: a problem of the ``test`` split has numbers that no ``train`` problem of that kind has.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import add, mul, sub
from typing import Literal

Split = Literal["train", "test"]
Operator = Literal["+", "-", "x"]

CAREFUL = "Work slowly and check every step."
"""An instruction under which the built-in policy makes fewer slips."""
STYLED = f"{CAREFUL} Begin with the word Well."
"""The same with a habit of speech that has nothing to do with being right."""

_OPERATORS: dict[str, Operator] = {"add": "+", "sub": "-", "mul": "x"}
_OPERATIONS: dict[Operator, Callable[[int, int], int]] = {"+": add, "-": sub, "x": mul}

_TEST_SHARE = 0.1
_CONCLUSION = " The answer is "

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jan", "Kim", "Leo")
ITEMS = ("apples", "books", "coins", "dolls", "eggs", "forks", "pens", "stamps", "shells", "cards")

_TEMPLATES = {
    "add": "{name} has {a} {items} and buys {b} more. How many {items} does {name} have?",
    "sub": "{name} has {a} {items} and gives away {b}. How many {items} does {name} have?",
    "add_sub": "{name} has {a} {items}, buys {b} more and gives away {c}. How many {items} does {name} have?",
    "mul_add": "{name} has {a} boxes with {b} {items} each and buys {c} more. "
    "How many {items} does {name} have?",
    "mul_sub": "{name} has {a} boxes with {b} {items} each and gives away {c}. "
    "How many {items} does {name} have?",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of working, ``left operator right``."""

    left: int
    operator: Operator
    right: int

    @property
    def result(self) -> int:
        """The right result."""
        return _OPERATIONS[self.operator](self.left, self.right)

    @property
    def slip(self) -> int:
        """The result of the typical mistake."""
        tens, units = self.left // 10, self.left % 10
        right_tens, right_units = self.right // 10, self.right % 10
        match self.operator:
            case "+":
                carries = units + right_units >= 10
                return self.result - 10 if carries else self.result + 1
            case "-":
                if units < right_units:  # takes the smaller digit from the larger, whichever stands above
                    return 10 * (tens - right_tens) + right_units - units
                return self.result - 1 if self.result > 1 else self.result + 1
            case "x":
                return self.left * (self.right - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A word problem. ``numbers`` are those in its text, in order."""

    kind: str
    numbers: tuple[int, ...]
    question: str

    @property
    def steps(self) -> tuple[Step, ...]:
        """The right working."""
        a, b = self.numbers[:2]
        first = Step(left=a, operator=_OPERATORS[self.kind[:3]], right=b)
        if len(self.numbers) == 2:
            return (first,)
        second = "+" if self.kind.endswith("add") else "-"
        return (first, Step(left=first.result, operator=second, right=self.numbers[2]))

    @property
    def answer(self) -> int:
        """The right answer."""
        return self.steps[-1].result

    @property
    def split(self) -> Split:
        """Whether these numbers belong to the training or the held-out problems."""
        digest = zlib.crc32(f"{self.kind} {self.numbers}".encode())
        return "test" if digest % 1000 < 1000 * _TEST_SHARE else "train"


def _numbers(kind: str, rng: random.Random) -> tuple[int, ...]:
    match kind:
        case "add":
            return rng.randint(3, 19), rng.randint(2, 9)
        case "sub":
            return rng.randint(11, 25), rng.randint(2, 9)
        case "add_sub":
            return rng.randint(3, 16), rng.randint(2, 9), rng.randint(2, 4)
        case "mul_add":
            return rng.randint(2, 5), rng.randint(2, 5), rng.randint(2, 9)
        case "mul_sub":
            a, b = rng.randint(2, 5), rng.randint(3, 5)
            return a, b, rng.randint(2, min(9, a * b - 1))
        case _:
            raise ValueError(f"unknown kind of problem {kind!r}; known: {', '.join(_TEMPLATES)}")


def tell(kind: str, numbers: tuple[int, ...], *, name: str, item: str) -> Problem:
    """The problem of a kind with these numbers, about a person and things."""
    words = dict(zip("abc", numbers, strict=False))
    return Problem(
        kind=kind, numbers=numbers, question=_TEMPLATES[kind].format(name=name, items=item, **words)
    )


def sample_problem(rng: random.Random, split: Split) -> Problem:
    """Draw one problem of a split."""
    while True:
        kind = rng.choice(sorted(_TEMPLATES))
        numbers = _numbers(kind, rng)
        problem = tell(kind, numbers, name=rng.choice(NAMES), item=rng.choice(ITEMS))
        if problem.split == split:
            return problem


def sample_step(rng: random.Random) -> Step:
    """Draw one line of working, as it occurs in problems of either split."""
    kind = rng.choice(sorted(_TEMPLATES))
    a, b, *rest = _numbers(kind, rng)
    steps = Problem(kind=kind, numbers=(a, b, *rest), question="").steps
    return rng.choice(steps)


def problems(split: Split, count: int, *, seed: int) -> list[Problem]:
    """`count` different problems of a split; the same for the same seed."""
    return list(_distinct(random.Random(f"{split} {seed}"), split, count))


def _distinct(rng: random.Random, split: Split, count: int) -> Iterator[Problem]:
    seen: set[str] = set()
    while len(seen) < count:
        problem = sample_problem(rng, split)
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem


def _text(lines: list[tuple[Step, int]]) -> str:
    working = " ".join(f"{step.left}{step.operator}{step.right}={result}." for step, result in lines)
    return f"{working}{_CONCLUSION}{lines[-1][1]}."


def working_of(solution: str) -> str:
    """The lines of working of a solution of ours."""
    return solution.partition(_CONCLUSION)[0]


def answer_of(solution: str) -> str:
    """The answer that a solution of ours ends with."""
    return solution.partition(_CONCLUSION)[2].removesuffix(".")


def solution_text(steps: Sequence[Step]) -> str:
    """The solution that carries out these steps, with its working."""
    return _text([(step, step.result) for step in steps])


def worked_solution(problem: Problem) -> str:
    """The right solution, with its working."""
    return solution_text(problem.steps)


def _with_other_operator(step: Step) -> Step:
    """The step with another operation, carried out without a slip."""
    other: Operator = "-" if step.operator == "+" and step.left > step.right else "+"
    if step.operator == "+" and other == "+":
        return Step(left=step.left, operator="x", right=step.right)
    return Step(left=step.left, operator=other, right=step.right)


def wrong_solution(problem: Problem, rng: random.Random) -> str:
    """A solution with one typical fault; its answer is always wrong.

    A slip in a step, a forgotten second step, another operation than the one that is asked for, or (where one step
    is enough) a second step that nobody asked for.
    """
    steps = problem.steps
    fault = rng.choice(("slip", "slip", "slip", "operation", "number"))
    first = steps[0]
    if len(steps) == 1:
        if fault == "operation":
            return _different(problem, [_with_other_operator(first)])
        if fault == "number":
            return _different(problem, [first, Step(left=first.result, operator="-", right=first.right)])
        return _text([(first, first.slip)])
    second = steps[1]
    if fault == "operation":
        changed = _with_other_operator(first)
        return _different(
            problem, [changed, Step(left=changed.result, operator=second.operator, right=second.right)]
        )
    if fault == "number":
        return _text([(first, first.result)])
    if rng.random() < 0.5:
        return _text([(first, first.result), (second, second.slip)])
    carried = Step(left=first.slip, operator=second.operator, right=second.right)
    return _text([(first, first.slip), (carried, max(carried.result, 0))])


def _different(problem: Problem, steps: list[Step]) -> str:
    """The working of these steps if it gives a wrong answer that is a number one can have, else a slip."""
    if 0 <= steps[-1].result != problem.answer:
        return solution_text(steps)
    *before, last = problem.steps
    return _text([(step, step.result) for step in before] + [(last, last.slip)])
