import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.tiny.tasks import Step, problems, sample_problem, worked_solution, wrong_solution

SEEDS = st.integers(0, 2**32 - 1)


def final_answer(solution: str) -> int:
    return int(solution.removesuffix(".").rsplit(" ", 1)[1])


@given(SEEDS)
def test_every_line_of_a_worked_solution_is_true(seed: int) -> None:
    problem = sample_problem(random.Random(seed), "train")
    lines = re.findall(r"(\d+)([-+x])(\d+)=(\d+)\.", worked_solution(problem))
    assert len(lines) == len(problem.steps)
    for left, operator, right, result in lines:
        assert eval(f"{left} {operator.replace('x', '*')} {right}") == int(result)
    assert final_answer(worked_solution(problem)) == problem.answer > 0


@given(SEEDS)
def test_a_wrong_solution_has_a_wrong_answer(seed: int) -> None:
    rng = random.Random(seed)
    problem = sample_problem(rng, "train")
    assert final_answer(wrong_solution(problem, rng)) != problem.answer


@given(SEEDS)
def test_numbers_of_a_problem_stand_in_its_text_in_order(seed: int) -> None:
    problem = sample_problem(random.Random(seed), "test")
    assert tuple(map(int, re.findall(r"\d+", problem.question))) == problem.numbers


def test_held_out_numbers_never_occur_in_training() -> None:
    train = {(p.kind, p.numbers) for p in problems("train", 2000, seed=1)}
    test = {(p.kind, p.numbers) for p in problems("test", 500, seed=1)}
    assert not train & test


def test_the_same_seed_gives_the_same_problems_and_no_problem_twice() -> None:
    first = problems("test", 300, seed=7)
    assert first == problems("test", 300, seed=7)
    assert first != problems("test", 300, seed=8)
    assert len({p.question for p in first}) == 300


@pytest.mark.parametrize(
    ("step", "result", "slip"),
    [
        (Step(left=27, operator="+", right=15), 42, 32),
        (Step(left=20, operator="+", right=15), 35, 36),
        (Step(left=42, operator="-", right=15), 27, 33),
        (Step(left=45, operator="-", right=12), 33, 32),
        (Step(left=4, operator="x", right=7), 28, 24),
    ],
)
def test_slips_are_the_typical_ones(step: Step, result: int, slip: int) -> None:
    assert (step.result, step.slip) == (result, slip)
