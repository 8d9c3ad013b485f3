"""The process in which expressions are compared: sympy may not come back, and only a process can be ended for sure.

Run as a script by `viva.eval.expressions`; it imports nothing of Viva. One line of JSON comes in per pair of texts
(``[wanted, given]``) and one goes out: whether they are the same expression. The first line out says that it works.
"""

import contextlib
import json
import logging
import math
import resource
import sys
from typing import Any, cast

from math_verify import LatexExtractionConfig, parse, verify

__all__: list[str] = []

_SECONDS = 3
"""Of the processor, for one pair, rounded up: then the kernel ends this process (SIGXCPU)."""

_BYTES = 4 << 30
"""Address space; beyond it there is no expression, as with any other error."""


def _limit(which: int, value: int) -> None:
    most = resource.getrlimit(which)[1]
    with contextlib.suppress(ValueError, OSError):  # some systems have no such limit
        resource.setrlimit(which, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def _parsed(text: str) -> list[Any]:
    found = parse(f"${text}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=0)
    # beside the expression it returns the text, which would make it a comparison of texts
    return [each for each in cast(list[Any], found) if not isinstance(each, str)]


def _are_the_same(wanted: str, given: str) -> bool:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + _SECONDS)
    with contextlib.suppress(MemoryError, RecursionError):
        gold, target = _parsed(wanted), _parsed(given)
        return bool(gold and target and verify(gold, target, timeout_seconds=0))
    return False


def _compare_lines() -> None:
    logging.disable()  # math-verify warns that its own limit of time, an alarm, is off
    _limit(resource.RLIMIT_AS, _BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    _write(_are_the_same("x+1", "1+x"))
    for line in sys.stdin:
        _write(_are_the_same(*json.loads(line)))


def _write(answer: bool) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _compare_lines()
