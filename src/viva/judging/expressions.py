"""Whether two short answers are the same mathematical expression, by math-verify (which asks sympy).

math-verify gets short final answers only, which are looked at first: its patterns and sympy's simplification can take
minutes on a few characters, it reads words as products of letters (``apples`` equals ``elppas``), and of an equation it
takes one side (``10=9`` equals 9). The rest is compared in a process of its own, since nothing else ends what hangs. It
runs this file as a script: one line of JSON per pair of texts (``[wanted, given]``) comes in, and one goes out, whether
they are the same expression. The first line out says that it works.
"""

import atexit
import contextlib
import json
import logging
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from importlib import import_module
from typing import Any, cast

from viva.conversation.sandbox import ask, limit, start_child

MAX_LENGTH = 200
"""Characters; longer answers are compared as text only."""

_ENDED_BY_A_TEXT = (-signal.SIGXCPU, -signal.SIGSEGV)
"""Ends that the text of a policy can bring about: seconds without end, and recursion that ends in the stack."""

_SECONDS = 3
"""Processor time for one pair, rounded up: then the kernel ends this process (SIGXCPU)."""

_BYTES = 4 << 30
"""Address space; beyond it there is no expression, as with any other error."""
_ASSIGNED = re.compile(r"^\s*([A-Za-z]|\\[a-z]+)\s*=(?!=)")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
FUNCTIONS = frozenset({"sin", "cos", "tan", "cot", "log", "exp", "sqrt", "pi"})
"""Words that an expression may have."""
_ENDLESS = ("!", "\\sum", "\\prod", "\\int", "\\lim", "\\binom", "**")
_POWER = re.compile(r"\^\s*(?:\{([^{}]*)\}|(\\?\w))")
_BRACKET_POWER = re.compile(r"[)\]}]\s*+\^\s*+\{?+\s*+[0-9]{2}")
_MAX_EXPONENT = 99
_MAX_BRACKETS = 8


def same_expression(given: str, wanted: str) -> bool:
    """Whether a given answer equals the known one as an expression; ``False`` if either is none that can be compared.

    ``x = 5`` counts as ``5``. Comparing takes at most four seconds of the processor; what takes longer is ``False``.

    Raises:
        RuntimeError: the process that compares does not start, or was ended from outside; never for what a model wrote.
    """
    texts = [without_name(text) for text in (wanted, given)]
    return all(_is_tame(text) for text in texts) and _PROCESS.are_the_same(texts)


class _Process:
    """Compares in a child process, which is started when it is first needed and again after it was ended."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def are_the_same(self, texts: list[str]) -> bool:
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self.close()
                self._child = self._started()
            answer = ask(self._child, json.dumps(texts) + "\n")
            if answer:
                return json.loads(answer) is True
            status = self._child.wait()
        if status not in _ENDED_BY_A_TEXT:
            raise RuntimeError(
                f"the process that compares formulas ended with status {status} while it compared {texts}; -9 is "
                "also what the system does when memory runs out. Nothing was graded: run again, or use an exact check"
            )
        return False

    def close(self) -> None:
        """Let the child end, which does so when nobody can write to it."""
        child, self._child = self._child, None
        if child is not None:
            child.communicate()

    def forget(self) -> None:
        """In a forked process: the child is the parent's."""
        self.__init__()

    def _started(self) -> "subprocess.Popen[str]":
        child = start_child(__file__)
        if ask(child, "").strip() != "true":
            child.communicate()
            raise RuntimeError(
                f"the process that compares formulas (math-verify) does not start: {sys.executable} {__file__} "
                f"ended with status {child.returncode}, with the reason above; pip install -U math-verify may help"
            )
        return child


_PROCESS = _Process()
atexit.register(_PROCESS.close)
os.register_at_fork(after_in_child=_PROCESS.forget)


def without_name(text: str) -> str:
    """The right side of ``x = 5``, where the left is one letter or a command like ``\\theta``; else the text."""
    text = text.strip().strip("$").strip()
    return _ASSIGNED.sub("", text, count=1).strip()


def _is_tame(text: str) -> bool:
    """Whether it is a short formula that can be simplified quickly."""
    if not text or len(text) > MAX_LENGTH or "=" in text or "$" in text:
        return False
    if any(mark in text for mark in _ENDLESS) or text.count("(") + text.count("{") > 2 * _MAX_BRACKETS:
        return False
    if _BRACKET_POWER.search(text):
        return False
    bare = _COMMAND.sub(" ", _TEXT.sub(" ", text))
    if set(_WORD.findall(bare)) - FUNCTIONS:
        return False
    return all(_is_small(exponent or letter) for exponent, letter in _POWER.findall(text)) and (
        len(_POWER.findall(text)) == text.count("^")
    )


def _is_small(exponent: str) -> bool:
    """Whether a power is no tower and no expansion without end."""
    return all(int(digits[:9]) <= _MAX_EXPONENT for digits in re.findall(r"[0-9]+", exponent))


# the child process


def _parsed(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    found = parse(f"${text}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=0)
    # beside the expression it returns the text, which would make it a comparison of texts
    return [each for each in cast(list[Any], found) if not isinstance(each, str)]


def _are_the_same(wanted: str, given: str) -> bool:
    from math_verify import verify

    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + _SECONDS)
    with contextlib.suppress(MemoryError, RecursionError):
        gold, target = _parsed(wanted), _parsed(given)
        return bool(gold and target and verify(gold, target, timeout_seconds=0))
    return False


def _compare_lines() -> None:
    import_module("math_verify")  # before there are limits
    logging.disable()  # math-verify warns that its own limit of time, an alarm, is off
    limit(resource.RLIMIT_AS, _BYTES)
    limit(resource.RLIMIT_CORE, 0)
    _write(_are_the_same("x+1", "1+x"))
    for line in sys.stdin:
        _write(_are_the_same(*json.loads(line)))


def _write(answer: bool) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _compare_lines()
