"""Problems of the package reasoning-gym (Stojanovski et al., 2025, arXiv 2505.24760) by name, and their own scorers.

A source is ``reasoning_gym:FAMILY,option=value,...``, as in ``reasoning_gym:chain_sum,max_terms=3,seed=7,size=200``:
options are the family's own, values are JSON (or plain words). A problem is a function of the source and a place in it.
Families' scorers look at the whole problem, metadata included, so its known answer carries where it comes from:
``11 [reasoning_gym:chain_sum,seed=7,size=200#12:9f3a01bc]``, the digest being that of question, answer and metadata.
Whoever has that text can make the problem again, and grade a stored reply.

Right is a score of exactly 1: the default scorer pays ``len(answer) / len(reply)`` for any reply with the answer in it.

Scorers of version 0.1.25 that run replies: by ``eval``, in the hope of a list (`_LITERALS`), and by sympy's
``parse_expr``, which is ``eval`` too (`_ARITHMETIC`, `_EXPRESSIONS`). What is no literal, or no short formula of
numbers, letters and a few known functions with small exponents, never gets there (`is_tame`).
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

from viva.conversation.messages import did_you_mean

PREFIX = "reasoning_gym:"
PACKAGE_VERSION = "0.1.25"
"""The version whose scorers were looked through for code that runs replies."""
TRAIN_SEED = 0
TEST_SEED = 1_000_000_000
"""Far from every training seed: problem i of seed s is that of seed s + i, so near seeds share problems."""

_NEEDS_HASH_SEED = frozenset(
    {
        "intermediate_integration",
        "isomorphic_strings",
        "knight_swap",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)
"""Families whose problems follow the order of Python's sets, which changes from process to process."""
_REFUSED = {
    "codeio": "its answers come from random programs and differ from call to call",
    "composite": "it mixes families; name one of them",
    "game_of_life_halting": "its scorer calls every reply right",
}
_REFERENCE = re.compile(r"#(\d{1,12}):([0-9a-f]{8})\]\Z")
_WORD = re.compile(r"[A-Za-z_][\w.+-]*")
_CANNOT_SCORE = (
    *(ValueError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(SyntaxError, AssertionError, RecursionError, NameError),
)
"""Errors that a scorer raises on a reply that has not the form of an answer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FamilyProblem:
    """One problem of a family."""

    source: str
    """The source's full name, `Family.name`."""
    index: int
    entry: Mapping[str, object] = dataclasses.field(repr=False)

    @property
    def question(self) -> str:
        """As asked."""
        return str(self.entry["question"])

    @property
    def answer(self) -> str:
        """The answer, empty where a family knows none and checks replies instead."""
        return "" if self.entry["answer"] is None else str(self.entry["answer"])

    @property
    def known_answer(self) -> str:
        """The answer with where the problem comes from, see the module."""
        return f"{self.answer} [{self.source}#{self.index}:{_digest(self.entry)}]".lstrip()

    def score(self, answer: str) -> float:
        """The family's score of an answer, in [0, 1]; 0 for what it cannot score, and for what must not be scored."""
        family = find_family(self.source)
        if answer != self.answer and not is_tame(family.family, answer):
            return 0.0
        try:
            return float(family.dataset.score_answer(answer, self.entry))
        except _CANNOT_SCORE:
            return 0.0

    def is_right(self, answer: str) -> bool:
        """Whether the score is exactly 1."""
        return self.score(answer) == 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family with its options."""

    family: str
    name: str
    """The source's name: all options that were given, seed and size, sorted."""
    dataset: Any = dataclasses.field(repr=False)

    def __len__(self) -> int:
        """Number of problems."""
        return len(self.dataset)

    def problem(self, index: int) -> FamilyProblem:
        """The problem at a place."""
        return _problem(self.name, index)


def is_generated(path: str) -> bool:
    """Whether the name of a source is one of reasoning-gym."""
    return path.startswith(PREFIX)


def plain_answer(answer: str) -> str:
    """A known answer without where it comes from."""
    found = _reference(answer)
    return answer if found is None else answer[: found[0]].rstrip()


def find_problem(answer: str) -> FamilyProblem | None:
    """The problem that a known answer names, made again; ``None`` if it names none. Another one now is an error."""
    found = _reference(answer)
    if found is None:
        return None
    start, name, index, digest = found
    problem = find_family(name).problem(index)
    if _digest(problem.entry) != digest or problem.answer != answer[:start].rstrip():
        raise ValueError(
            f"{name} makes another problem {index} than the one that was stored, whose answer was {answer[:start]!r}; "
            "give PYTHONHASHSEED the value it had, or install the version of reasoning-gym that the run records"
        )
    return problem


def find_family(name: str, *, seed: int = TRAIN_SEED, size: int | None = None) -> Family:
    """The family that a source names.

    Args:
        name: Of the source.
        seed: Where the name gives none.
        size: Number of problems, where the name gives none; default: the family's own, 500.
    """
    family, *parts = _split(name.removeprefix(PREFIX))
    options: dict[str, Any] = {"seed": seed} | ({} if size is None else {"size": size})
    given: set[str] = set()
    for part in parts:
        option, equals, value = part.partition("=")
        if not equals or not option or option in given:
            raise ValueError(
                f"{name}: options must be OPTION=VALUE, each once, with commas between them; got {part!r}"
            )
        given.add(option)
        options[option] = _value(value)
    return _made(family, json.dumps(options, sort_keys=True))


@functools.lru_cache(maxsize=32)
def _made(family: str, options_text: str) -> Family:
    options = json.loads(options_text)
    registry = _registry()
    if family in _REFUSED or family not in registry:
        allowed = families()
        hint = "" if family in _REFUSED else did_you_mean(family, allowed)
        reason = _REFUSED.get(family, "there is no such family")
        raise ValueError(f"{PREFIX}{family}: {reason}.{hint} Allowed: {', '.join(allowed)}")
    if family in _NEEDS_HASH_SEED and not os.environ.get("PYTHONHASHSEED", "").isdecimal():
        raise ValueError(
            f"{PREFIX}{family}: its problems follow the order of Python's sets, which differs from process to process. "
            "Start viva with PYTHONHASHSEED=0 in the environment, or use another family"
        )
    dataset_class, config_class = registry[family]
    known = [field.name for field in dataclasses.fields(config_class)]
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known)
            raise ValueError(f"{PREFIX}{family} has no option {option!r}; it has {', '.join(known)}.{hint}")
    try:
        config = config_class(**options)
        dataset = dataset_class(config=config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"{PREFIX}{family} refuses {_written(options)}: {error or 'no reason given'}"
        ) from error
    options["size"] = config.size
    return Family(family=family, name=f"{PREFIX}{family},{_written(options)}", dataset=dataset)


def families() -> list[str]:
    """Names of all families that can be used, sorted."""
    return sorted(set(_registry()) - set(_REFUSED))


@functools.cache
def _registry() -> dict[str, tuple[Any, Any]]:
    """Classes of the data sets and of their options, by family."""
    try:
        version = importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version != PACKAGE_VERSION:
        raise ValueError(
            f"{PREFIX}... needs reasoning-gym {PACKAGE_VERSION}, whose scorers were checked for code that runs "
            f"replies; {'it is not installed' if version is None else f'{version} is installed'}. pip install "
            "'viva-rl[reasoning-gym]'"
        )
    from reasoning_gym.factory import DATASETS  # the package fills it

    return DATASETS


@functools.lru_cache(maxsize=1024)
def _problem(name: str, index: int) -> FamilyProblem:
    family = find_family(name)
    if not 0 <= index < len(family):
        raise ValueError(f"{name} has the problems 0 to {len(family) - 1}; got {index}")
    return FamilyProblem(source=name, index=index, entry=family.dataset[index])


def _reference(answer: str) -> tuple[int, str, int, str] | None:
    """Place in a known answer at which its source's name begins, the name, the problem's number, and its digest."""
    start = answer.rfind(f"[{PREFIX}")
    end = _REFERENCE.search(answer) if start >= 0 else None
    if end is None or end.start() < start:
        return None
    return start, answer[start + 1 : end.start()], int(end.group(1)), end.group(2)


def _digest(entry: Mapping[str, object]) -> str:
    text = repr((entry["question"], entry["answer"], entry.get("metadata")))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()


def _split(text: str) -> list[str]:
    """Parts between commas that stand outside brackets and quotes."""
    parts, depth, is_quoted, start = list[str](), 0, False, 0
    for place, letter in enumerate(text):
        if letter == '"':
            is_quoted = not is_quoted
        elif not is_quoted:
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(letter, 0)
            if letter == "," and depth == 0:
                parts.append(text[start:place])
                start = place + 1
    return [*parts, text[start:]]


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _written(options: Mapping[str, object]) -> str:
    """Options as the name of a source has them."""

    def told(value: object) -> str:
        if isinstance(value, str) and _WORD.fullmatch(value) and _value(value) == value:
            return value
        return json.dumps(value, separators=(",", ":"))

    return ",".join(f"{name}={told(value)}" for name, value in sorted(options.items()))


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
