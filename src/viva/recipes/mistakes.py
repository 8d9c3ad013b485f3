"""Mistakes in options on the command line, in words: the name, what came, what is allowed."""

import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import chz

from viva.run.secrets import printable

__all__ = ["check_arguments", "check_home", "check_kinds", "told_mistake", "unknown_option"]

_UNKNOWN = re.compile(r"Extraneous argument '([^']*)'")
_UNREADABLE = re.compile(r"Could not interpret argument (.*) provided for param '([^']*)'", re.DOTALL)
_MISSING = re.compile(r"Missing required arguments? for parameters?\(s\): (.*)")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_SAMPLES = {int: "8", float: "0.5", str: '"a"'}
_LONGEST_VALUE = 200
_NAME = re.compile(r"(?:--)?(\w[\w.-]*)")
_HELP = "--help"


def check_arguments(argv: Sequence[str], config_class: type[Any]) -> None:
    """Refuse arguments that are not of the form ``name=value``, and options that are given twice.

    Args:
        argv: As they were typed; with ``--help`` among them nothing else counts.
        config_class: A class made with ``chz.chz``, whose options they are.

    Raises:
        ValueError: See above.
    """
    if _HELP in argv:
        return
    seen: dict[str, str] = {}
    for argument in argv:
        typed, equals, _ = argument.partition("=")
        name = _NAME.fullmatch(typed)
        if not equals or name is None:
            raise ValueError(_no_option(argument, config_class))
        if name.group(1) in seen:
            raise ValueError(
                f"{name.group(1)} is given twice, as {_short(seen[name.group(1)])} and {_short(argument)}; leave one "
                "of them out"
            )
        seen[name.group(1)] = argument
        check_home(argument)


def check_home(argument: str) -> None:
    """Refuse a path, alone or behind ``name=``, that begins with ``~`` and names nobody's folder.

    Raises:
        ValueError: See above.
    """
    value = argument.partition("=")[2] or argument
    if value.startswith("~") and not set(value) & set(" \n") and os.path.expanduser(value) == value:
        raise ValueError(
            f"{_short(argument)} begins with the name of a user who has no folder here; write ~/... for your own "
            "folder, or the whole path"
        )


def check_kinds(config: Any) -> None:
    """Refuse lists and pairs that are none: a text that reads as Python's ``lambda`` is called by the reader.

    Raises:
        ValueError: See above.
    """
    for name, field in chz.chz_fields(config).items():
        value = getattr(config, name)
        kinds = [get_origin(part) for part in _parts(field.final_type)]
        for kind in (list, dict):
            if kind in kinds and value is not None and not isinstance(value, kind):
                raise ValueError(f"{name} must be {_allowed(field.final_type)}; got {value!r:.80}")


def _no_option(argument: str, config_class: type[Any]) -> str:
    fields = chz.chz_fields(config_class)
    name = argument.partition("=")[0].lstrip("-").replace("-", "_")
    close = [name] if name in fields else get_close_matches(name, fields, n=1)
    hint = f" Did you mean {close[0]}=VALUE, without a space?" if close else ""
    return f"{_short(repr(argument))} is no option of the form name=value.{hint} --help lists all options"


def told_mistake(error: BaseException, config_class: type[Any]) -> str:
    """One line for the user.

    Args:
        error: What ``chz`` raised when it read the command line.
        config_class: What it was to make.
    """
    text = str(error).strip()
    fields = chz.chz_fields(config_class)
    if found := _UNKNOWN.match(text):
        told = unknown_option(found.group(1), config_class)
    elif (found := _UNREADABLE.match(text)) and found.group(2) in fields:
        value, name = found.groups()
        kind = fields[name].final_type
        told = f"{name} must be {_allowed(kind)}; got {_short(value)}{_near(value, kind)}"
    elif text.startswith("Expected '") and (name := text.split("'")[1]) in fields:
        kind = fields[name].final_type
        told = f"{name} must be {_allowed(kind)}; got a value of the kind {text.rpartition(', got ')[2]}"
    elif found := _MISSING.match(text):
        told = f"the option {found.group(1)} is needed; --help lists all options"
    else:
        told = _short(text.partition("\n")[0])
    return printable(told)


def unknown_option(name: str, config_class: type[Any]) -> str:
    """One line about a name that is no option, with the nearest one."""
    close = get_close_matches(name, chz.chz_fields(config_class), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown option {name!r}.{hint} --help lists all options"


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
