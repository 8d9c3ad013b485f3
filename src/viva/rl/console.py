"""What the user sees while a run goes: a calm progress line on a terminal, one plain line per step elsewhere."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn

__all__ = ["RunConsole"]

_SHOWN = (
    ("test/direct_accuracy", "held-out accuracy", "{:.1%}"),
    ("reward/std", "reward std", "{:.2f}"),
    ("judge/tie_rate", "ties", "{:.0%}"),
    ("parse/ok", "parsed", "{:.0%}"),
    ("rollout/void", "void", "{:.0f}"),
    ("optim/kl_sample_train_v1", "kl", "{:.1e}"),
    ("time/tokens_per_second", "tok/s", "{:,.0f}"),
)
_HIDDEN_AT_ZERO = {"rollout/void"}


class RunConsole:
    """Progress of one run. Use it as a context manager."""

    def __init__(
        self,
        *,
        num_steps: int,
        first_step: int = 0,
        show_steps: bool = True,
        console: Console | None = None,
    ) -> None:
        self.console = console if console is not None else Console(highlight=False)
        self._num_steps = num_steps
        self._first_step = first_step
        self._show_steps = show_steps
        self._started = time.monotonic()
        self._said: set[str] = set()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            transient=True,
            disable=not (show_steps and self.console.is_terminal),
        )
        self._task: TaskID = self._progress.add_task("steps", total=num_steps, completed=first_step, left="")

    def __enter__(self) -> "RunConsole":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def message(self, text: str) -> None:
        """One line of text."""
        self.console.print(text, soft_wrap=True, markup=False)

    def message_once(self, topic: str, text: str) -> None:
        """One line of text, unless there was one on this topic."""
        if topic not in self._said:
            self._said.add(topic)
            self.message(text)

    def phase(self, text: str) -> None:
        """What the run is doing right now; shown on terminals only."""
        self._progress.update(self._task, description=text)

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report a finished step with the time that is left at the pace so far."""
        done = step + 1 - self._first_step
        seconds = (time.monotonic() - self._started) / done * (self._num_steps - step - 1)
        left = f"{_duration(seconds)} left"
        parts = [f"step {step + 1}/{self._num_steps}"]
        parts += [
            f"{label} {form.format(metrics[key])}"
            for key, label, form in _SHOWN
            if key in metrics and not (key in _HIDDEN_AT_ZERO and metrics[key] == 0)
        ]
        if self._show_steps:
            self.message(" | ".join([*parts, left]))
        self._progress.update(self._task, completed=step + 1, left=left)


def _duration(seconds: float) -> str:
    minutes, whole_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole_seconds:02d} s" if minutes else f"{whole_seconds} s"
