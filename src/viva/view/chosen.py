"""Which conversations a report shows: early, late, best, worst, changed most by revision, and one that failed."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from viva.view.entries import Entry

__all__ = ["Choice", "choose"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A conversation and why it is shown."""

    entry: Entry
    reason: str


def choose(
    entries: Sequence[Entry], *, with_tokens: Collection[tuple[int, int]] = frozenset()
) -> list[Choice]:
    """A few telling conversations, each once, in the order in which they are worth reading.

    Where answers are known, best and worst go by the share of agents whose final solution is right; else by
    how clearly the judge decided (the spread of the rewards). Ties go to the later step, then the earlier
    group, so the choice is a function of the entries alone.

    Args:
        entries: All transcripts of a run, in the order of (step, group).
        with_tokens: Those, by (step, group), whose tokens were kept.
    """
    recorded = [entry for entry in entries if entry.has_record]
    sound = [entry for entry in recorded if not entry.is_void]
    choices: list[Choice] = []

    def add(entry: Entry, reason: str) -> None:
        if all(choice.entry is not entry for choice in choices):
            choices.append(Choice(entry=entry, reason=reason))

    if sound:
        last_step = max(entry.step for entry in sound)
        add(sound[0], "the first conversation of the run")
        add(
            next(entry for entry in sound if entry.step == last_step),
            "the first conversation of the last step",
        )
        graded = [entry for entry in sound if entry.share_correct is not None]
        if graded:
            add(
                _highest(graded, lambda entry: entry.share_correct or 0.0), "the most agents right at the end"
            )
            add(
                _highest(graded, lambda entry: -(entry.share_correct or 0.0)),
                "the fewest agents right at the end",
            )
            mended, spoiled = (
                _highest(graded, lambda entry, sign=sign: sign * entry.num_mended) for sign in (1, -1)
            )
            if mended.num_mended > 0:
                add(mended, "revision mended the most solutions")
            if spoiled.num_mended < 0:
                add(spoiled, "revision spoiled the most solutions")
        else:
            add(_highest(sound, lambda entry: entry.reward_spread), "the judge decided most clearly")
            add(_highest(sound, lambda entry: -entry.reward_spread), "the judge saw the least difference")
    kept = [entry for entry in sound if (entry.step, entry.group) in with_tokens]
    if kept:
        add(kept[-1], "the last conversation whose tokens were kept")
    failed = [entry for entry in recorded if entry.is_void or entry.num_failures]
    if failed:
        last = failed[-1]
        add(
            last,
            "a conversation in which an agent failed"
            if last.num_failures
            else "a conversation that was void",
        )
    return choices


def _highest(entries: Sequence[Entry], value: Callable[[Entry], float]) -> Entry:
    return max(entries, key=lambda entry: (value(entry), entry.step, -entry.group))
