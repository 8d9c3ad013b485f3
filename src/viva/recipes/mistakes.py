"""What is wrong with an option on the command line, in words: its name, what came, what is allowed."""

import re
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import chz

from viva.rl.secrets import printable

__all__ = ["told_mistake"]

_UNKNOWN = re.compile(r"Extraneous argument '([^']*)'")
_UNREADABLE = re.compile(r"Could not interpret argument (.*) provided for param '([^']*)'", re.DOTALL)
_MISSING = re.compile(r"Missing required arguments? for parameters?\(s\): (.*)")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_SAMPLES = {int: "8", float: "0.5", str: '"a"'}
_LONGEST_VALUE = 200


def told_mistake(error: BaseException, config_class: type[Any]) -> str:
    """One line for the user.

    Args:
        error: What ``chz`` raised when it read the command line.
        config_class: What it was to make.
    """
    text = str(error).strip()
    fields = chz.chz_fields(config_class)
    if found := _UNKNOWN.match(text):
        name = found.group(1)
        close = get_close_matches(name, fields, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        told = f"unknown option {name!r}.{hint} --help lists all options"
    elif (found := _UNREADABLE.match(text)) and found.group(2) in fields:
        value, name = found.groups()
        kind = fields[name].final_type
        told = f"{name} must be {_allowed(kind)}; got {_short(value)}{_near(value, kind)}"
    elif found := _MISSING.match(text):
        told = f"the option {found.group(1)} is needed; --help lists all options"
    else:
        told = _short(text.partition("\n")[0])
    return printable(told)


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}..."


def _parts(kind: Any) -> list[Any]:
    """The types that a type allows, without ``None``."""
    if get_origin(kind) in (Union, UnionType):
        return [part for part in get_args(kind) if part is not NoneType]
    return [kind]


def _choices(kind: Any) -> list[str]:
    return [str(choice) for part in _parts(kind) if get_origin(part) is Literal for choice in get_args(part)]


def _allowed(kind: Any) -> str:
    parts = _parts(kind)
    choices = _choices(kind)
    if choices:
        words = f"one of {', '.join(choices)}"
    else:
        words = " or ".join(_words(part) for part in parts)
    return f"{words}, or left out" if NoneType in get_args(kind) else words


def _words(kind: Any) -> str:
    arguments = get_args(kind)
    if get_origin(kind) is list:
        sample = _SAMPLES.get(arguments[0], "...")
        return f"a list, like [{sample}, {sample}]"
    if get_origin(kind) is dict:
        key = "0" if arguments[0] is int else '"name"'
        values = _parts(arguments[1])
        what = " or ".join(_WORDS.get(value, str(value)) for value in values)
        return f"pairs of {_WORDS[arguments[0]]} and {what}, like {{{key}: {_SAMPLES[values[0]]}}}"
    return _WORDS.get(kind, str(kind))


def _near(value: str, kind: Any) -> str:
    close = get_close_matches(value.strip("'\""), _choices(kind), n=1)
    return f". Did you mean {close[0]!r}?" if close else ""
