"""Objects of the user's own code, named on a command line as ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import chain, count
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from viva.conversation.messages import did_you_mean
from viva.judging.answers import CHECKS, AnswerCheck, answer_groups, answer_key
from viva.judging.reasoning_gym import plain_answer

if TYPE_CHECKING:
    from viva.rewards.base import Reward

_HERE = "python"
_remembered: dict[str, object] = {}
"""Objects that this process has handed over itself, by name."""
_loaded: dict[Path, tuple[bytes, ModuleType]] = {}
"""Files that were loaded as modules, with what they held then."""
_UNDECLARED = (OSError, TypeError, ValueError, RecursionError)
"""Errors of an object without a declaration: typed into an interpreter, or holding something that has none."""


def remember(value: object) -> str:
    """A target that stands for an object of this process, for options that name the user's code.

    It is ``module:NAME`` where a module has the object under its own name, else ``python:NAME-DIGEST``, which only
    this process can load: a protocol that was edited is another one, and the same one has its name in any process.
    """
    if isinstance(value, str):
        return value
    named: Any = value
    name = str(getattr(named, "__name__", None) or getattr(named, "name", None) or type(value).__name__)
    module = sys.modules.get(str(getattr(named, "__module__", "")))
    if module is not None and module.__name__ != "__main__" and getattr(module, name, None) is value:
        return f"{module.__name__}:{name}"
    digest = _digest_here(value)
    stem = name if digest is None else f"{name}-{digest[:8]}"
    keys = chain([stem], (f"{stem}-{number}" for number in count(2)))
    key = next(key for key in keys if _is_same(_remembered.setdefault(key, value), value))
    return f"{_HERE}:{key}"


def _is_same(known: object, value: object) -> bool:
    """Whether two objects are one, or were declared in the same words."""
    if known is value or (inspect.ismethod(value) and known == value):  # a method is a new object each time
        return True
    try:
        return _declared(known) == _declared(value)
    except _UNDECLARED:
        return False


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
                f"{target!r} was an object of the process that trained; give the code again where an option takes it, "
                "in Python the object, on the command line path.py:NAME. An evaluation takes no protocol: "
                "kinds=direct needs none (in Python kinds=['direct']), and one trained as path.py:NAME is found again"
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


def source_digests(*names: str | None) -> dict[str, str | None]:
    """Digests of the user's own code that was loaded by some of these names, for ``config.json``."""
    return {name: source_digest(name) for name in names if name is not None and is_target(name)}


def _digest_here(value: Any) -> str | None:
    for told in (_declared, inspect.getsource):
        try:
            return hashlib.sha256(told(value).encode()).hexdigest()
        except _UNDECLARED:
            continue
    return None


def _declared(value: Any) -> str:
    """The text of an object's declaration, with what a function has from outside."""
    if value is None or isinstance(value, (str, int, float, bool, Enum)):
        return repr(value)
    # of a class of the user's own the code may have changed, too
    if type(value).__module__.startswith("viva.") and is_dataclass(value):
        declared = {each.name: _declared(getattr(value, each.name)) for each in fields(value)}
        return f"{type(value).__name__}({declared})"
    if isinstance(value, functools.partial):
        return f"partial({_declared(value.func)}, {_declared(value.args)}, {_declared(value.keywords)})"
    if isinstance(value, Mapping):
        pairs = cast(Mapping[object, object], value).items()
        return f"{[(_declared(key), _declared(each)) for key, each in pairs]}"
    if isinstance(value, (list, tuple)):
        return f"{[_declared(each) for each in cast(Sequence[object], value)]}"
    if inspect.ismethod(value):
        return f"{_declared(value.__self__)} {_declared(value.__func__)}"
    if not inspect.isfunction(value):
        return inspect.getsource(value)
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    if any(isinstance(each, (list, dict, set)) for each in cells):
        raise TypeError("what it holds may change")
    held = [_declared(each) for each in (value.__defaults__, value.__kwdefaults__, cells)]
    # several functions may stand in one line
    columns = [place[2:] for place in value.__code__.co_positions()] if value.__name__ == "<lambda>" else []
    return f"{inspect.getsource(value.__code__)} {held} {columns}"


def _module(where: str) -> ModuleType:
    if where.endswith(".py"):
        return _file_module(where)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"cannot import {where!r}: {error}. Give a path.py:ATTRIBUTE, or install it."
        ) from error


def _file_module(where: str) -> ModuleType:
    """The module that a file is: one for as long as its content stays, so that what it defines is itself."""
    path = Path(where).resolve()
    # a name that no other module has: a user's random.py must not take the place of Python's
    name = f"{path.stem}_{hashlib.blake2b(bytes(path), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"there is no file {where!r}; give path.py:ATTRIBUTE, seen from the working folder")
    code = path.read_bytes()
    known, module = _loaded.get(path, (None, None))
    if module is not None and known == code:
        return module
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{where!r} is no Python code: {error}; mend it") from error
    _loaded[path] = code, module
    return module


def reward_named(value: object) -> "Reward":
    """The reward that an option or a protocol names, the user's own included.

    Raises:
        ValueError: If there is no such reward, or the user's code is not there.
    """
    from viva.rewards import find_reward

    return find_reward(load_target(value) if isinstance(value, str) and is_target(value) else value)


class GraderError(ValueError):
    """A user's own grader that raises, or does not say whether a reply is right."""


def find_check(name: str) -> AnswerCheck:
    """The check of a name.

    Raises:
        ValueError: If there is none, or the user's code is not there or cannot take a reply and an answer.
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
    try:
        inspect.signature(function).bind("", "")
    except TypeError as error:
        raise ValueError(f"grader={name} must take a reply and the known answer: {error}") from error
    except ValueError:  # some functions in C do not say what they take
        pass

    from numpy import bool_

    from viva.rewards.function import place_of

    def is_right(text: str, answer: str) -> bool:
        try:
            verdict: object = function(text, plain_answer(answer))
        except Exception as error:
            told = f"{type(error).__name__}: {error}, in the grader {name!r}{place_of(error)}"
            raise GraderError(told) from error
        if not isinstance(verdict, bool | bool_):
            raise GraderError(f"grader={name} must return True or False; got {verdict!r}")
        return bool(verdict)

    return AnswerCheck(name=name, is_right=is_right, vote=answer_key, group=answer_groups)
