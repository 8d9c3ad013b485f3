"""A run's headline: held-out accuracy before and after, and whether the run was healthy."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from viva.conversation.messages import counted
from viva.run.secrets import printable
from viva.view.run_index import RunIndex, read_run

ACCURACY = "test/direct_accuracy"
"""The metric of the headline."""

_BESIDE = {
    f"{ACCURACY}_greedy": "at temperature 0",
    f"{ACCURACY}_lenient": "known answer named, finished or not",
    f"{ACCURACY}_greedy_lenient": "named at temperature 0",
}
"""Figures beside it: a gain that is none at temperature 0 is sharpening, one that is none here is form."""
_MAJORITY = "test/direct_maj@"
_QUESTIONS = "test/direct_questions"
_CONVERSATION = "test/conversation/correct/final"
_CORRELATION = "test/conversation/rank_correlation"
_READ = "test/conversation/parse/ok"
_TALKS = {_CONVERSATION: "right at the end", _READ: "replies read as asked"}
_JUDGEMENTS = {
    "test/judge/accuracy": "right",
    "test/judge/position_bias": "verdicts that flip with the order",
}
WIN_RATE = "test/judged/win_rate"
"""The metric of the headline where no answers are known."""
_JUDGED = {
    f"{WIN_RATE}/length_controlled": "at equal length",
    "test/judged/flip_rate": "winners that change with the order",
    "test/judged/longer_rate": "verdicts for the longer answer",
    "test/judged/accuracy": "verdicts for the right answer",
}
"""Figures beside it: what its judge can be trusted with."""

_MAX_VOID_REASONS = 10

_NO_CAUSES = ("agent_", "experts/", "optim/", "test/", "time/")
"""Beginnings of metrics that say nothing of what keeps a run from learning; there are many of them."""

_HEALTH = {
    _CONVERSATION: "held-out, right after a conversation",
    "test/conversation/correct/best": "held-out, highest score after a conversation is right",
    "correct/final": "right after the conversation",
    "flip/wrong_to_right": "wrong solutions that revision mends",
    "flip/right_to_wrong": "right solutions that revision spoils",
    "judge/pair_accuracy": "judge's scores of both orders favour the right one",
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
    """A metric at its first and last measurement, with 95 % intervals where a standard error was recorded."""

    first_step: int
    last_step: int
    before: float
    after: float
    before_half_width: float | None
    after_half_width: float | None

    @property
    def is_change(self) -> bool:
        """Whether it was measured more than once."""
        return self.first_step < self.last_step

    @property
    def difference(self) -> float:
        """After minus before."""
        return self.after - self.before

    @property
    def half_width(self) -> float | None:
        """Half width of the difference's interval, taking the two measurements as independent.

        They ask the same questions, so this interval is wider than need be rather than too narrow.
        """
        if self.before_half_width is None or self.after_half_width is None:
            return None
        return math.hypot(self.before_half_width, self.after_half_width)


def gain_of(run: RunIndex, metric: str, *, num_steps: float = math.inf) -> Gain | None:
    """The change of a metric within so many steps; ``None`` if it was not measured."""
    points = [(step, value) for step, value in run.points(metric) if step <= num_steps]
    if not points:
        return None
    (first, before), (last, after) = points[0], points[-1]
    widths = run.half_widths(metric)
    return Gain(
        first_step=first,
        last_step=last,
        before=before,
        after=after,
        # an error of 0 (all right or all wrong) says only that the approximation does not hold there
        before_half_width=widths.get(first) or None,
        after_half_width=widths.get(last) or None,
    )


def headline_text(run_dir: str | Path) -> str | None:
    """The headline of a run in a line or two; ``None`` if it never measured answers to test prompts."""
    run = read_run(run_dir)
    gain = gain_of(run, ACCURACY)
    if gain is None or not gain.is_change:
        return _judged_text(run)
    before = _share_text(gain.before, gain.before_half_width)
    after = _share_text(gain.after, gain.after_half_width)
    beside = [each for each in _beside(run) if "named" not in each[0]]
    return (
        f"held-out accuracy, asked directly: {before} before, {after} after {counted(gain.last_step, 'step')} "
        f"({100 * gain.difference:+.1f} points; intervals are 95 %)"
        f"{_further_line('the same questions,', _changes(beside))}{_conversation_line(run)}"
        f"{_further_line('held-out judgements:', _changes(_gains(run, _JUDGEMENTS)))}"
    )


def _share_text(share: float, half_width: float | None) -> str:
    return f"{100 * share:.1f} %" + (f" ± {100 * half_width:.1f}" if half_width is not None else "")


def _judged_text(run: RunIndex) -> str | None:
    """The headline of a run whose answers a judge compared with those before training."""
    gain = gain_of(run, WIN_RATE)
    if gain is None or not gain.is_change:
        return None
    told = [f"{title} {100 * each.after:.1f} %" for title, each in _beside_judged(run, gain.last_step)]
    return (
        f"answers to test prompts against those before training: {_share_text(gain.after, gain.after_half_width)} of "
        f"verdicts won after {counted(gain.last_step, 'step')} (50 % is no difference; the interval is 95 %)"
        + (f"\nits judge, {'; '.join(told)}" if told else "")
    )


def _gains(run: RunIndex, titles: Mapping[str, str]) -> list[tuple[str, Gain]]:
    """Titles, given by metric, of those that were measured, and their gains."""
    found = [(title, gain_of(run, key)) for key, title in titles.items()]
    return [(title, gain) for title, gain in found if gain is not None]


def _beside(run: RunIndex) -> list[tuple[str, Gain]]:
    """Figures beside the headline, with their titles."""
    votes = sorted(
        (int(key.removeprefix(_MAJORITY)), key) for key in run.metrics if key.startswith(_MAJORITY)
    )
    return _gains(run, _BESIDE | {key: f"majority of {count}" for count, key in votes[-1:]})


def _conversation_line(run: RunIndex) -> str:
    """Shares of whole conversations, with the form of replies by segment."""
    beginning = _READ.removesuffix("ok")
    segments = {
        key: key.removeprefix(beginning).removesuffix("/ok")
        for key in sorted(run.metrics)
        if key.startswith(beginning) and key.endswith("/ok") and key != _READ
    }
    # a protocol of one segment has the same figure twice
    parts = _changes(_gains(run, _TALKS | (segments if len(segments) > 1 else {})))
    correlation = gain_of(run, _CORRELATION)
    if correlation is not None and correlation.is_change:
        parts.append(
            f"rank correlation of scores with being right {correlation.before:+.2f} before, "
            f"{correlation.after:+.2f} after"
        )
    return _further_line("held-out conversations:", parts)


def _changes(gains: Iterable[tuple[str, Gain]]) -> list[str]:
    """Shares before and after, where they were measured twice."""
    return [
        f"{title} {100 * gain.before:.1f} % before, {100 * gain.after:.1f} % after"
        for title, gain in gains
        if gain.is_change
    ]


def _further_line(about: str, parts: Sequence[str]) -> str:
    return f"\n{about} {'; '.join(parts)}" if parts else ""


def summary_answer(run: RunIndex) -> dict[str, object]:
    """The page's summary of a run, ready for JSON.

    Returns:
        ``causes`` (what kept it from learning, and alarms: step and text), ``has_accuracy``, ``questions`` (how many of
        them were asked), ``accuracy``, ``judged`` (answers against those before training) and ``health`` (cards of
        title, value and what stands below), ``void`` (count and reason of void conversations) and ``torn`` (files whose
        last line is).
    """
    gain = gain_of(run, ACCURACY)
    judged = gain_of(run, WIN_RATE)
    questions = run.points(_QUESTIONS)
    return {
        "causes": _causes(run),
        "has_accuracy": gain is not None,
        "questions": questions[-1][1] if questions else None,
        "accuracy": [] if gain is None else [*_accuracy_cards(gain), *_beside_cards(run)],
        "judged": [] if judged is None else _judged_cards(run, judged),
        "health": [*_health_cards(run), *_count_cards(run)],
        "void": _void_reasons(run),
        "torn": [printable(name) for name in run.torn],
    }


def _causes(run: RunIndex) -> list[dict[str, object]]:
    """Causes that kept it from learning and alarms that fired, in the words that the terminal had."""
    from viva.run.alarms import ALARMS, fired
    from viva.training.advice import told_causes  # loads what plays conversations

    rows: dict[int, dict[str, float]] = {step: {} for step, groups in run.points("rollout/groups") if groups}
    for key in run.metrics:
        if not key.startswith(_NO_CAUSES):
            for step, value in run.points(key):
                if step in rows:
                    rows[step][key] = value
    steps = list(rows)
    told = [(steps[place], cause.text) for place, cause in told_causes(list(rows.values()))]
    first: dict[str, int] = {}
    for step, row in rows.items():
        for name in fired(row):
            first.setdefault(name, step)
    told += [(step, f"alarm {name}: {ALARMS[name].text}") for name, step in first.items()]
    return [{"step": step + 1, "text": printable(text)} for step, text in told]


def _card(title: str, value: str, below: str = "") -> dict[str, str]:
    return {"title": title, "value": value, "below": below}


def _share_card(title: str, share: float, half_width: float | None = None) -> dict[str, str]:
    """A share with its 95 % interval, where one was recorded."""
    low, high = (max(0.0, min(1.0, share + sign * (half_width or 0.0))) for sign in (-1, 1))
    below = f"95 % interval {100 * low:.1f} to {100 * high:.1f} %" if half_width else ""
    return _card(title, f"{100 * share:.1f} %", below)


def _accuracy_cards(gain: Gain) -> list[dict[str, str]]:
    cards = [_share_card(f"before (step {gain.first_step})", gain.before, gain.before_half_width)]
    if gain.is_change:
        low, high = (100 * (gain.difference + sign * (gain.half_width or 0.0)) for sign in (-1, 1))
        below = "" if gain.half_width is None else f"95 % interval {low:+.1f} to {high:+.1f}"
        cards += [
            _share_card(f"after (step {gain.last_step})", gain.after, gain.after_half_width),
            _card("gain", f"{100 * gain.difference:+.1f} points", below),
        ]
    return cards


def _beside_cards(run: RunIndex) -> list[dict[str, str]]:
    return [
        _card(
            f"{title} (step {gain.last_step})",
            f"{100 * gain.after:.1f} %",
            f"at first {100 * gain.before:.1f} %" if gain.is_change else "",
        )
        for title, gain in _beside(run)
    ]


def _judged_cards(run: RunIndex, won: Gain) -> list[dict[str, str]]:
    title = f"judged better than before training (step {won.last_step})"
    beside = _beside_judged(run, won.last_step)
    return [
        _share_card(title, won.after, won.after_half_width),
        *(_share_card(f"{name} (step {each.last_step})", each.after) for name, each in beside),
    ]


def _beside_judged(run: RunIndex, step: int) -> list[tuple[str, Gain]]:
    """Figures of a step beside its win rate, with their titles; not every evaluation has all of them."""
    return [(title, gain) for title, gain in _gains(run, _JUDGED) if gain.last_step == step]


def _health_cards(run: RunIndex) -> list[dict[str, str]]:
    """Last value of the shares that tell whether a run was healthy, with the first one."""
    cards: list[dict[str, str]] = []
    for title, gain in _gains(run, _HEALTH):
        below = f"at first {100 * gain.before:.4g} %"
        cards.append(_card(f"{title} (step {gain.last_step})", f"{100 * gain.after:.1f} %", below))
    gain = gain_of(run, _CORRELATION) or gain_of(run, "rank_correlation")
    if gain is not None:
        title = f"rank correlation of scores with being right (step {gain.last_step})"
        cards.append(_card(title, f"{gain.after:+.2f}", f"at first {gain.before:+.2f}"))
    return cards


def _count_cards(run: RunIndex) -> list[dict[str, str]]:
    cards = [_card("steps recorded", f"{run.num_steps:,}")] if run.kind == "run" else []
    if run.entries:
        num_void = sum(entry.is_void for entry in run.entries.values())
        cards.append(_card("conversations", f"{len(run.entries):,}", f"{num_void:,} void"))
    return cards


def _void_reasons(run: RunIndex) -> list[dict[str, object]]:
    """Reasons why conversations were void, the most frequent first."""
    entries = [entry for entry in run.entries.values() if entry.is_void]
    counts = Counter(entry.void_reason or "no reason recorded" for entry in entries)
    return [{"count": count, "reason": reason} for reason, count in counts.most_common(_MAX_VOID_REASONS)]
