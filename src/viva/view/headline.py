"""What a reader wants to know first: held-out accuracy before and after, and whether the run was healthy."""

import math
from dataclasses import dataclass
from pathlib import Path

from viva.conversation.wording import counted
from viva.view.chart import draw_chart
from viva.view.markup import card, data, escape, format_number
from viva.view.run_files import Run, metric_series, read_run
from viva.view.series import Z95

__all__ = ["ACCURACY", "ACCURACY_STDERR", "Gain", "accuracy_gain", "headline_html", "headline_text"]

ACCURACY = "test/direct_accuracy"
"""The metric of the headline."""

ACCURACY_STDERR = f"{ACCURACY}_stderr"
"""Its standard error."""

_QUESTIONS = "test/direct_questions"

_CONVERSATION = "test/conversation/correct/final"
_CORRELATION = "test/conversation/rank_correlation"

_HEALTH = {
    _CONVERSATION: "held-out, right after a conversation",
    "test/conversation/correct/best": "held-out, highest score after a conversation is right",
    "correct/final": "right after the conversation",
    "flip/wrong_to_right": "wrong solutions that revision mends",
    "flip/right_to_wrong": "right solutions that revision spoils",
    "judge/accuracy": "judge prefers the right one",
    "judge/verdict/accuracy": "verdicts prefer the right one",
    "reward_truth_gap": "pairs in which the wrong one scores higher",
    "judge/position_bias": "verdicts that flip with the order",
    "judge/verdict/order_flips": "verdicts that flip with the order",
    "parse/ok": "replies read as asked",
}
"""Shares that tell whether a run was healthy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Held-out accuracy at the first and last evaluation, as shares of 1, with 95 % intervals."""

    first_step: int
    last_step: int
    before: float
    after: float
    before_half_width: float | None
    after_half_width: float | None

    @property
    def difference(self) -> float:
        """After minus before."""
        return self.after - self.before

    @property
    def half_width(self) -> float | None:
        """Of the difference's interval, taking the two measurements as independent.

        They ask the same questions, so this interval is wider than need be rather than too narrow.
        """
        if self.before_half_width is None or self.after_half_width is None:
            return None
        return math.hypot(self.before_half_width, self.after_half_width)


def accuracy_gain(run: Run) -> Gain | None:
    """The headline's numbers; ``None`` if the run never measured held-out accuracy."""
    points = run.curves.get(ACCURACY)
    if not points:
        return None
    errors = dict(run.curves.get(ACCURACY_STDERR, ()))
    # an error of 0 (all right or all wrong) says only that the approximation does not hold there
    half_widths = [Z95 * errors[step] if errors.get(step) else None for step, _ in (points[0], points[-1])]
    return Gain(
        first_step=points[0][0],
        last_step=points[-1][0],
        before=points[0][1],
        after=points[-1][1],
        before_half_width=half_widths[0],
        after_half_width=half_widths[1],
    )


def headline_text(run_dir: str | Path) -> str | None:
    """The headline of a run in a line or two; ``None`` if it never measured held-out accuracy."""
    run = read_run(run_dir)
    gain = accuracy_gain(run)
    if gain is None or gain.first_step == gain.last_step:
        return None
    before, after = (
        f"{100 * share:.1f} %" + (f" ± {100 * half:.1f}" if half is not None else "")
        for share, half in ((gain.before, gain.before_half_width), (gain.after, gain.after_half_width))
    )
    return (
        f"held-out accuracy, asked directly: {before} before, {after} after {counted(gain.last_step, 'step')} "
        f"({100 * gain.difference:+.1f} points; intervals are 95 %){_conversation_text(run)}"
    )


def _conversation_text(run: Run) -> str:
    """The same of whole conversations, where they were measured: a further line."""
    parts: list[str] = []
    accuracy, correlation = run.curves.get(_CONVERSATION, ()), run.curves.get(_CORRELATION, ())
    if len(accuracy) > 1:
        parts.append(
            f"right at the end {100 * accuracy[0][1]:.1f} % before, {100 * accuracy[-1][1]:.1f} % after"
        )
    if len(correlation) > 1:
        parts.append(
            f"rank correlation of scores with being right {correlation[0][1]:+.2f} before, "
            f"{correlation[-1][1]:+.2f} after"
        )
    return f"\nheld-out conversations: {'; '.join(parts)}" if parts else ""


def headline_html(run: Run) -> str:
    """The first section of the page."""
    gain = accuracy_gain(run)
    return (
        f"<section>{_causes(run)}{_accuracy(run, gain)}"
        f'<div class="cards">{"".join(_health_cards(run) + _count_cards(run))}</div></section>'
    )


def _causes(run: Run) -> str:
    """What kept it from learning, in the words that the terminal had."""
    from viva.training.advice import told_causes  # loads what plays conversations

    rows: dict[int, dict[str, float]] = {}
    for key, points in run.curves.items():
        for step, value in points:
            rows.setdefault(step, {})[key] = value
    played = [step for step in sorted(rows) if rows[step].get("rollout/groups")]
    told = told_causes([rows[step] for step in played])
    items = "".join(f"<li>Step {data(played[place] + 1)}: {escape(cause.text)}</li>" for place, cause in told)
    return f"<h2>What keeps it from learning</h2><ul>{items}</ul>" if items else ""


def _accuracy(run: Run, gain: Gain | None) -> str:
    if gain is None:
        return (
            '<p class="muted">Held-out accuracy was not measured: the run had no test set with answers.</p>'
        )
    series = metric_series(run.curves, ACCURACY, name="held-out direct accuracy")
    cards = [
        _card("before", _share(gain.before), _interval(gain.before, gain.before_half_width), gain.first_step)
    ]
    if gain.last_step != gain.first_step:
        cards.append(
            _card("after", _share(gain.after), _interval(gain.after, gain.after_half_width), gain.last_step)
        )
        shown = data(gain.difference, f"{100 * gain.difference:+.1f} points")
        cards.append(_card("gain", shown, _gain_interval(gain), None))
    questions = run.curves.get(_QUESTIONS)
    count = f" ({data(questions[-1][1])} questions)" if questions else ""
    chart = draw_chart([series], label="held-out direct accuracy", size=(860, 240))
    return (
        '<h2>Held-out direct accuracy</h2><p class="muted">Share of test questions answered right on the '
        f'bare question, without any conversation{count}.</p><div class="cards">{"".join(cards)}</div>'
        f'<figure class="wide">{chart}</figure>'
    )


def _card(title: str, value: str, below: str, step: int | None) -> str:
    return card(title if step is None else f"{title} (step {step})", value, below)


def _share(value: float) -> str:
    return data(value, f"{100 * value:.1f} %")


def _interval(value: float, half_width: float | None) -> str:
    if half_width is None:
        return ""
    low, high = max(0.0, value - half_width), min(1.0, value + half_width)
    return f"95 % interval {100 * low:.1f} to {100 * high:.1f} %"


def _gain_interval(gain: Gain) -> str:
    if gain.half_width is None:
        return ""
    low, high = gain.difference - gain.half_width, gain.difference + gain.half_width
    return f"95 % interval {100 * low:+.1f} to {100 * high:+.1f}"


def _health_cards(run: Run) -> list[str]:
    """Last value of the shares that tell whether a run was healthy, with the first one."""
    cards: list[str] = []
    for key, title in _HEALTH.items():
        points = run.curves.get(key)
        if points:
            below = f"at first {format_number(100 * points[0][1])} %"
            cards.append(_card(title, _share(points[-1][1]), below, points[-1][0]))
    correlation = run.curves.get(_CORRELATION) or run.curves.get("rank_correlation")
    if correlation:
        (_, first), (step, last) = correlation[0], correlation[-1]
        cards.append(
            _card(
                "rank correlation of scores with being right",
                data(last, f"{last:+.2f}"),
                f"at first {first:+.2f}",
                step,
            )
        )
    return cards


def _count_cards(run: Run) -> list[str]:
    cards = [_card("steps recorded", data(run.num_steps), "", None)]
    if run.transcripts:
        num_void = sum(entry.is_void for entry in run.transcripts)
        below = f"{data(num_void)} void"
        cards.append(_card("conversations", data(len(run.transcripts)), below, None))
    return cards
