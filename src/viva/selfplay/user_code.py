"""Objects of the user's own code, named on a command line as ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from viva.conversation.messages import did_you_mean
from viva.judging.answers import CHECKS, AnswerCheck, answer_key
from viva.judging.reasoning_gym import plain_answer

_HERE = "python"
_remembered: dict[str, object] = {}
"""Objects that this process has handed over itself, by name."""


def remember(value: object) -> str:
    """A target that stands for an object of this process, for options that name the user's code.

    It is ``module:NAME`` where a module has the object under its own name, else ``python:NAME``, which only this
    process can load.
    """
    if isinstance(value, str):
        return value
    named: Any = value
    name = str(getattr(named, "__name__", None) or getattr(named, "name", None) or type(value).__name__)
    module = sys.modules.get(str(getattr(named, "__module__", "")))
    if module is not None and module.__name__ != "__main__" and getattr(module, name, None) is value:
        return f"{module.__name__}:{name}"
    _remembered[name] = value
    return f"{_HERE}:{name}"


def is_target(name: str) -> bool:
    """Whether a name has the form of a target: something, a colon, an attribute."""
    where, _, attribute = name.rpartition(":")
    return bool(where and attribute)


def load_target(target: str) -> Any:
    """The object a target names.

    Raises:
        ValueError: If the file, the module or the attribute is not there. What the code itself raises passes through.
    """
    where, _, attribute = target.rpartition(":")
    if where == _HERE:
        if attribute not in _remembered:
            raise ValueError(
                f"{target!r} was an object of the process that trained; give the code again: in Python the object, on "
                "the command line path.py:NAME"
            )
        return _remembered[attribute]
    module = _module(where)
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, dir(module))
        raise ValueError(f"{where!r} has no attribute {attribute!r}; name one that it defines.{hint}")
    return getattr(module, attribute)


def source_digest(target: str) -> str | None:
    """SHA-256 of the Python file with the object of a target that was loaded; ``None`` where there is no such file."""
    where, _, attribute = target.rpartition(":")
    if where == _HERE:
        return _digest_here(_remembered[attribute])
    path = Path(where if where.endswith(".py") else str(importlib.import_module(where).__file__))
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".py" else None


def _digest_here(value: Any) -> str | None:
    try:
        return hashlib.sha256(inspect.getsource(value).encode()).hexdigest()
    except (OSError, TypeError):  # typed into an interpreter, or no function or class
        return None


def _module(where: str) -> ModuleType:
    if where.endswith(".py"):
        path = Path(where).resolve()
        # a name that no other module has: a user's random.py must not take the place of Python's
        name = f"{path.stem}_{hashlib.blake2b(bytes(path), digest_size=4).hexdigest()}"
        spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
        if spec is None or spec.loader is None:
            raise ValueError(
                f"there is no file {where!r}; give path.py:ATTRIBUTE, seen from the working folder"
            )
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except SyntaxError as error:
            raise ValueError(f"{where!r} is no Python code: {error}; mend it") from error
        return module
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"cannot import {where!r}: {error}. Give a path.py:ATTRIBUTE, or install it."
        ) from error


def find_check(name: str) -> AnswerCheck:
    """The check of a name.

    Raises:
        ValueError: If there is none, or the user's code is not there.
    """
    if name in CHECKS:
        return CHECKS[name]
    if not is_target(name):
        raise ValueError(
            f"grader must be one of {', '.join(CHECKS)}, or your own as module:FUNCTION or path.py:FUNCTION; "
            f"got {name!r}"
        )
    function = load_target(name)
    if not callable(function):
        raise ValueError(f"grader={name} is no function; it must take a reply and the known answer")

    from numpy import bool_

    def is_right(text: str, answer: str) -> bool:
        verdict: object = function(text, plain_answer(answer))
        if not isinstance(verdict, bool | bool_):
            raise ValueError(f"grader={name} must return True or False; got {verdict!r}")
        return bool(verdict)

    return AnswerCheck(name=name, is_right=is_right, vote=answer_key)
