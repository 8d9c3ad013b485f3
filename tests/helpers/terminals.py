"""A terminal that is recorded, and a clock that is set."""

import io

from rich.console import Console


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int = 76) -> Console:
    given = {"file": io.StringIO(), "record": True, "width": width, "highlight": False, "_environ": {}}
    return Console(force_terminal=True, force_interactive=True, **given)
