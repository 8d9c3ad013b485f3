"""The guard before reasoning-gym's scorers: no reply gets there that they would run as a program or compute for ever.

Scorers of version 0.1.25 that run replies: by ``eval``, in the hope of a list (`_LITERALS`), and by sympy's
``parse_expr``, which is ``eval`` too (`_ARITHMETIC`, `_EXPRESSIONS`). What is no literal, or no short formula of
numbers, letters and a few known functions with small exponents, never gets there.
"""

import ast
import re
import warnings

MAX_LENGTH = 4000
"""Characters; longer answers are wrong."""
_LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
_ARITHMETIC = frozenset({"countdown", "puzzle24"})
_EXPRESSIONS = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})
_FUNCTIONS = frozenset({"cos", "exp", "log", "sin", "sqrt", "tan"})
_CONSTANTS = frozenset({"E", "pi"})
_MAX_EXPRESSION = 300
_MAX_CALLS = 8
_MAX_EXPONENT = 100
_MAX_POWERS = 12
_MAX_NUMBER = 10**12
_HUGE_POWER_OF_TEN = re.compile(r"(?<![\w.,])[\d.,]+[eE][+-]?\d{4}")
_MANY_TURNS = re.compile(r"\d{3}")
_LITERAL_NODES = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict),
    *(ast.UnaryOp, ast.USub, ast.UAdd, ast.Load, ast.Name),
)
_ARITHMETIC_NODES = (
    *(ast.Expression, ast.Constant, ast.UnaryOp, ast.USub, ast.UAdd),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div),
)
_EXPRESSION_NODES = (*_ARITHMETIC_NODES, ast.Name, ast.Load, ast.Call, ast.Pow)


def is_tame(family: str, answer: str) -> bool:
    """Whether the scorer of a family may see an answer."""
    if len(answer) > MAX_LENGTH or _HUGE_POWER_OF_TEN.search(answer):
        return False
    if family == "rubiks_cube":  # R999999999 is a turn written so many times
        return not _MANY_TURNS.search(answer)
    if family in _ARITHMETIC:
        return _is_expression(answer, _ARITHMETIC_NODES)
    if family in _EXPRESSIONS:
        return _is_expression(answer, _EXPRESSION_NODES)
    return family not in _LITERALS or _is_no_program(answer)


def _parsed(text: str) -> ast.Expression | None:
    """The syntax tree of one expression of Python; ``None`` if it is none, so that ``eval`` fails as well."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_no_program(text: str) -> bool:
    """Whether ``eval`` makes a literal of it, or fails."""
    tree = _parsed(text)
    return tree is None or all(isinstance(node, _LITERAL_NODES) for node in ast.walk(tree))


def _is_expression(text: str, allowed: tuple[type[ast.AST], ...]) -> bool:
    """Whether it is a formula of such nodes that is computed at once."""
    tree = _parsed(text) if len(text) <= _MAX_EXPRESSION else None
    if tree is None:
        return False
    nodes = list(ast.walk(tree))
    powers = [node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)]
    return (
        all(isinstance(node, allowed) and _is_known(node) for node in nodes)
        and sum(isinstance(node, ast.Call) for node in nodes) <= _MAX_CALLS
        and len(powers) <= _MAX_POWERS
        and all(_is_small(power.right) and not _has_power(power.left) for power in powers)
    )


def _is_known(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and abs(node.value) <= _MAX_NUMBER
    if isinstance(node, ast.Name):
        return len(node.id) == 1 or node.id in _FUNCTIONS | _CONSTANTS
    if isinstance(node, ast.Call):
        called = node.func
        return (
            isinstance(called, ast.Name)
            and called.id in _FUNCTIONS
            and len(node.args) == 1
            and not node.keywords
        )
    return True


def _is_small(exponent: ast.expr) -> bool:
    """Whether an exponent is a small number, a fraction of such, or the negative of one; or a letter."""
    if isinstance(exponent, ast.UnaryOp):
        return _is_small(exponent.operand)
    if isinstance(exponent, ast.BinOp):
        return isinstance(exponent.op, ast.Div) and _is_small(exponent.left) and _is_small(exponent.right)
    if isinstance(exponent, ast.Name):
        return True
    return (
        isinstance(exponent, ast.Constant)
        and isinstance(exponent.value, int | float)
        and exponent.value <= _MAX_EXPONENT
    )


def _has_power(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Pow) for each in ast.walk(node))
