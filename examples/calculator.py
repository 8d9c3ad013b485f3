"""Agents that may calculate: a Python function as a tool, in a process of its own.

viva protocol check examples/calculator.py:SOLVERS --agents 2
viva train examples/calculator.py:SOLVERS num_agents=2 train_prompts_path=problems.jsonl
"""

import ast
import operator
from collections.abc import Callable

from viva import Protocol, Round

OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> float:
    """The value of numbers joined by + - * / and brackets."""

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        raise ValueError("only numbers, + - * / and brackets")

    return value(ast.parse(expression, mode="eval").body)


SOLVERS = Protocol(
    rounds=[
        Round("solve", "Solve the problem.", tools=[calculate], max_calls=3),
        Round("conclude", "Write the full solution that you now hold right.", ["solve"]),
    ],
    reward="majority",
    name="solvers",
)
