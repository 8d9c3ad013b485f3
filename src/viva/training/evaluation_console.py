"""What the user sees while ``viva eval`` goes on: one line that stays in its place, plain lines elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from viva.conversation.wording import counted
from viva.training.console import BARS_PER_SECOND, duration, progress_row
from viva.training.progress import StepProgress

__all__ = ["EvaluationConsole"]


class EvaluationConsole:
    """Progress of an evaluation. Use it as a context manager; it writes to the error stream, tables go to the other.

    Args:
        console: Where to write.
        clock: Seconds.
    """

    def __init__(
        self, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console if console is not None else Console(stderr=True, highlight=False)
        self._clock = clock
        self._title = ""
        self._began = clock()
        self._progress: StepProgress | None = None
        self._live: Live | None = None
        if self.console.is_interactive:
            self._live = Live(
                console=self.console,
                get_renderable=self.display,
                refresh_per_second=BARS_PER_SECOND,
                transient=True,
            )

    def __enter__(self) -> "EvaluationConsole":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._end()
        if self._live is not None:
            self._live.stop()

    def begin(self, title: str, count: int, noun: str) -> StepProgress:
        """A part begins: a `viva.training.progress.Begin`."""
        self._end()
        progress = StepProgress(num_groups=count, expected_tokens=None, clock=self._clock, noun=noun)
        self._title, self._began, self._progress = title, self._clock(), progress
        return progress

    def display(self) -> RenderableType:
        """What stands on the terminal. A thread of its own draws it, at any time."""
        bars = Table.grid(padding=(0, 1))
        progress = self._progress
        if progress is not None:
            bars.add_row(*progress_row(self._title, progress))
        return bars

    def _end(self) -> None:
        """A line for the part that is over."""
        progress = self._progress
        if progress is None:
            return
        self._progress = None
        took = duration(self._clock() - self._began)
        self.console.print(
            f"{self._title}: {progress.num_done} {progress.noun}, {counted(progress.num_tokens, 'token')} in {took}",
            soft_wrap=True,
            markup=False,
        )
