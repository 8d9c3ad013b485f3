"""Progress of a run or an evaluation: a display that stays in its place on a terminal, plain lines elsewhere."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self, TypeAlias

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from viva.conversation.messages import counted
from viva.run.secrets import printable
from viva.training.advice import WINDOW, Cause, causes


@dataclass(kw_only=True)
class StepProgress:
    """Conversations and tokens of one step so far; or questions, and what else an evaluation consists of."""

    num_groups: int
    noun: str = "conversations"
    """Name of those that are counted."""
    title: str = ""
    """Name of a part of an evaluation."""
    expected_tokens: float | None = None
    """Tokens that are likely to be sampled, judging by the step or evaluation before."""
    clock: Callable[[], float] = time.monotonic
    num_done: int = 0
    """Conversations that ended."""
    num_tokens: int = 0
    """Sampled, of all conversations: those that go on included."""
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def on_reply(self, num_tokens: int) -> None:
        """Count a reply."""
        self.num_tokens += num_tokens

    def on_group(self, _: object) -> None:
        """Count a conversation."""
        self.num_done += 1

    @property
    def is_done(self) -> bool:
        """Whether all have ended."""
        return self.num_done >= self.num_groups

    @property
    def share(self) -> float:
        """The finished share of the step's rollouts, from 0 to 1; by tokens, once their number can be expected."""
        ended = self.num_done / self.num_groups if self.num_groups else 1.0
        if not self.expected_tokens or ended == 1.0:
            return ended
        return max(ended, min(0.99, self.num_tokens / self.expected_tokens))

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self.clock() - self._began

    @property
    def tokens_per_second(self) -> float:
        """Mean since the step began."""
        seconds = self.seconds
        return self.num_tokens / seconds if seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Until the last conversation ends at the pace so far; ``None`` as long as nothing is known."""
        share = self.share
        return self.seconds * (1 - share) / share if share > 0 else None


Begin: TypeAlias = Callable[[str, int, str], StepProgress]
"""Begins a part of an evaluation: its title, how many of what it consists of; counted with what it returns."""


def unseen(title: str, count: int, noun: str) -> StepProgress:
    """A `Begin` that shows nothing."""
    return StepProgress(title=title, num_groups=count, noun=noun)


_BAR_WIDTH = 24
BARS_PER_SECOND = 2
"""Redraws of a terminal's display per second."""
_TREND_STEPS = 30
_TREND_WIDTH = 70
"""Characters of a terminal that has room for trends beside the values."""
_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class _Shown:
    """A metric that has a place in the display."""

    key: str
    label: str
    form: str
    is_hidden_at_zero: bool = False


_SHOWN = (
    _Shown("test/direct_accuracy", "held-out accuracy", "{:.1%}"),
    _Shown("test/direct_accuracy_greedy", "at temperature 0", "{:.1%}"),
    _Shown("test/conversation/correct/final", "held-out conversations", "{:.1%}"),
    _Shown("test/judged/win_rate", "wins against before training", "{:.1%}"),
    # the mean of a tournament is 0 whatever is learned
    _Shown("reward/mean", "reward", "{:.2f}", is_hidden_at_zero=True),
    _Shown("test/judge/accuracy", "held-out judgements", "{:.1%}"),
    _Shown("imitation/nll", "nats per token", "{:.3f}"),
    _Shown("reward/std", "reward std", "{:.2f}"),
    _Shown("gain/mean", "gain of revision", "{:+.3f}"),
    _Shown("sign/against_majority", "votes against the majority", "{:.0%}"),
    _Shown("judge/pair_accuracy", "judge is right", "{:.0%}"),
    _Shown("judge/confidence", "judge's confidence", "{:.0%}"),
    _Shown("judge/disagreement", "judge contradicts itself", "{:.0%}"),
    _Shown("judge/tie_rate", "ties", "{:.0%}"),
    _Shown("judge/so_far/tokens", "judge's tokens so far", "{:,.0f}"),
    _Shown("judge/so_far/price", "judge's price so far", "{:,.4f}"),
    _Shown("parse/ok", "parsed", "{:.0%}"),
    _Shown("rollout/void", "void", "{:.0f}", is_hidden_at_zero=True),
    _Shown("optim/kl_sample_train_v1", "kl", "{:.1e}"),
    _Shown("time/tokens_per_second", "tok/s", "{:,.0f}"),
)
_ZERO = 1e-9
"""Values below this are shown as 0."""
_SAMPLED = "rollout/sampled_tokens"


class _Display(ABC):
    """Lines on a console, and on a terminal a display below them that stays in its place."""

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float],
        *,
        is_shown: bool = True,
        is_transient: bool = False,
    ) -> None:
        self.console = console
        self._clock = clock
        self._live: Live | None = None
        if is_shown and console.is_interactive:
            self._live = Live(
                console=console,
                get_renderable=self.display,
                refresh_per_second=BARS_PER_SECOND,
                transient=is_transient,
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(is_complete=kind is None)
        if self._live is not None:
            self._live.stop()

    @abstractmethod
    def display(self) -> RenderableType:
        """The terminal's display. A thread of its own draws it, at any time."""

    @abstractmethod
    def _end(self, *, is_complete: bool = True) -> None:
        """End what is shown as going on."""


class RunConsole(_Display):
    """Progress of one run. Use it as a context manager.

    Messages and warnings are shown whatever ``show_steps`` says; ``history`` has the metrics of the steps before.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        first_step: int = 0,
        show_steps: bool = True,
        history: Iterable[Mapping[str, float]] = (),
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps = num_steps
        self._first_step = first_step
        self._next_step = first_step
        self._show_steps = show_steps
        self._started = self._step_began = clock()
        self._phase: str | None = "starting"
        self._progress: StepProgress | None = None
        self._evaluation: StepProgress | None = None
        self._evaluated: dict[str, int] = {}
        """Tokens that a part of the last evaluation sampled, by its title."""
        self._sampled: float | None = None
        self._first: dict[str, float] = {}
        self._last: dict[str, deque[float]] = {}
        """The first value of every metric that is shown, and the last ones."""
        self._said: set[str] = set()
        self._recent: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        """Metrics of the last steps with rollouts."""
        self._num_played = self._num_updates = 0.0
        for metrics in history:
            self.measured(metrics)
        # last, since what is shown is drawn once where the display is made
        console = console if console is not None else Console(highlight=False)
        super().__init__(console, clock, is_shown=show_steps)

    def _end(self, *, is_complete: bool = True) -> None:
        self._phase = self._progress = self._evaluation = None

    def message(self, text: str) -> None:
        """Print one line of text, without credentials."""
        self.console.print(printable(text), soft_wrap=True, markup=False)

    def warn_once(self, topic: str, text: str) -> None:
        """One line that says what is wrong and what to do, unless there was one on this topic."""
        if topic not in self._said:
            self._said.add(topic)
            self.message(f"warning: {text}")

    def phase(self, text: str) -> None:
        """Show what the run is doing, beside conversations that go on; on terminals only."""
        self._phase = text

    def sampling(self, num_groups: int) -> StepProgress:
        """A step's conversations begin; they are counted with what this returns, and shown until all have ended."""
        progress = StepProgress(num_groups=num_groups, expected_tokens=self._sampled, clock=self._clock)
        self._phase, self._progress = None, progress
        return progress

    def evaluating(self, title: str, count: int, noun: str) -> StepProgress:
        """Announce a part of an evaluation (a `Begin`), beside conversations that go on."""
        self.evaluated()
        expected = self._evaluated.get(title)
        self._evaluation = StepProgress(
            title=title, num_groups=count, noun=noun, expected_tokens=expected, clock=self._clock
        )
        self._phase = None
        return self._evaluation

    def evaluated(self) -> None:
        """The evaluation, or a part of it, is over; how much it took is kept for the next one."""
        over, self._evaluation = self._evaluation, None
        if over is not None and over.is_done:
            self._evaluated[over.title] = over.num_tokens

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report a finished step with the time that is left at the pace so far."""
        self._next_step, self._step_began = step + 1, self._clock()
        self._phase = None
        self.measured(metrics)
        self._explain(step, causes(tuple(self._recent)))
        if self._show_steps and self._live is None:
            parts = [f"step {step + 1}/{self._num_steps}"]
            parts += [
                f"{shown.label} {shown.form.format(metrics[shown.key])}"
                for shown in _SHOWN
                if shown.key in metrics and not (shown.is_hidden_at_zero and abs(metrics[shown.key]) < _ZERO)
            ]
            self.message(" | ".join([*parts, self._time_left()]))

    def ended(self) -> None:
        """The last step is over: say what kept a short run from learning, and whether anything was trained at all."""
        if self._num_played <= len(self._recent):
            self._explain(self._next_step - 1, causes(tuple(self._recent), is_whole_run=True))
        if self._num_played and not self._num_updates:
            self.warn_once(
                "nothing trained",
                "the optimiser took no step in the whole run: the weights are those that it began with, see above",
            )

    def _explain(self, step: int, found: Iterable[Cause]) -> None:
        for cause in found:
            self.warn_once(cause.topic, f"step {step + 1}: {cause.text}")

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Keep what was measured for the display, and to explain it."""
        if metrics.get("rollout/groups"):
            self._recent.append(metrics)
            self._num_played += 1
            self._num_updates += metrics.get("optim/steps", 0)
        self._sampled = metrics.get(_SAMPLED, self._sampled)
        for shown in _SHOWN:
            if shown.key in metrics:
                value = metrics[shown.key]
                self._first.setdefault(shown.key, value)
                self._last.setdefault(shown.key, deque(maxlen=_TREND_STEPS)).append(value)

    def display(self) -> RenderableType:
        """The run, the step, and the numbers that matter."""
        phase, progress, evaluation = self._phase, self._progress, self._evaluation
        bars = Table.grid(padding=(0, 1))
        bars.add_row(
            f"step {min(self._next_step + 1, self._num_steps)}/{self._num_steps}",
            ProgressBar(total=max(self._num_steps, 1), completed=self._next_step, width=_BAR_WIDTH),
            self._time_left(),
        )
        if phase is not None:
            bars.add_row(phase)
        if evaluation is not None and not evaluation.is_done:
            bars.add_row(*progress_row("evaluating", evaluation))
        if progress is not None and not progress.is_done:
            bars.add_row(*progress_row("sampling", progress))
        return Group(bars, self._figures())

    def _figures(self) -> Table:
        figures = Table.grid(padding=(0, 2))
        for column in ("left", "right", "left", "left"):
            figures.add_column(justify=column, no_wrap=True)
        for shown in _SHOWN:
            last = self._last.get(shown.key)
            if last is None or (shown.is_hidden_at_zero and max(map(abs, last)) < _ZERO):
                continue
            row = [shown.label, shown.form.format(last[-1])]
            if self.console.width >= _TREND_WIDTH and len(last) > 1:
                spark = sparkline(last) if self.console.encoding.startswith("utf") else ""
                row += [spark, f"from {shown.form.format(self._first[shown.key])}"]
            figures.add_row(*row)
        return figures

    def _time_left(self) -> str:
        done, left = self._next_step - self._first_step, self._num_steps - self._next_step
        if not done:
            return ""
        pace = (self._step_began - self._started) / done
        return f"{duration(max(0.0, pace * left - (self._clock() - self._step_began)))} left"


def sparkline(values: Iterable[float]) -> str:
    """Values as a row of blocks, from the lowest to the highest; a flat row if they are equal."""
    known = list(values)
    low, high = min(known), max(known)
    if low == high:
        return _SPARKS[len(_SPARKS) // 2] * len(known)
    scale = (len(_SPARKS) - 1) / (high - low)
    return "".join(_SPARKS[round((value - low) * scale)] for value in known)


def progress_row(title: str, progress: StepProgress) -> tuple[RenderableType, ...]:
    """One row of a display: how far it is, as a bar and in words."""
    parts = [f"{progress.num_done} of {progress.num_groups} {progress.noun}"]
    if progress.num_tokens:
        parts.append(f"{progress.tokens_per_second:,.0f} tok/s")
    if progress.seconds_left is not None:
        parts.append(f"{duration(progress.seconds_left)} left")
    bar = ProgressBar(total=1.0, completed=progress.share, width=_BAR_WIDTH)
    return title, bar, ", ".join(parts)


def duration(seconds: float) -> str:
    """Seconds for people."""
    minutes, whole_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole_seconds:02d} s" if minutes else f"{whole_seconds} s"


class EvaluationConsole(_Display):
    """Progress of an evaluation. Use it as a context manager; it writes to the error stream, tables go to the other."""

    def __init__(
        self, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress: StepProgress | None = None
        console = console if console is not None else Console(stderr=True, highlight=False)
        super().__init__(console, clock, is_transient=True)

    def begin(self, title: str, count: int, noun: str) -> StepProgress:
        """A part begins: a `Begin`."""
        self._end()
        self._progress = StepProgress(title=title, num_groups=count, noun=noun, clock=self._clock)
        return self._progress

    def display(self) -> RenderableType:
        """The part that goes on."""
        bars = Table.grid(padding=(0, 1))
        progress = self._progress
        if progress is not None:
            bars.add_row(*progress_row(progress.title, progress))
        return bars

    def _end(self, *, is_complete: bool = True) -> None:
        """A line for the part that is over."""
        progress = self._progress
        if progress is None or not is_complete:
            return
        self._progress = None
        took = duration(progress.seconds)
        self.console.print(
            f"{progress.title}: {progress.num_done} {progress.noun}, {counted(progress.num_tokens, 'token')} in {took}",
            soft_wrap=True,
            markup=False,
        )
