"""Causes that keep a run from learning, read off its metrics, in words and each with its remedy.

Some are certain at once (a judge that cannot be read, prompts beyond the context); the others must hold in each of
`WINDOW` steps in a row, or in all steps of a run that is shorter. A cause that explains another stands in its place:
where every reply is cut, rewards without spread are no news.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from viva.judging.comparison import NoValidComparisonsError
from viva.training.data import SPELLED_OUT
from viva.training.sampling import PromptTooLongError

Metrics: TypeAlias = Mapping[str, float]

WINDOW = 3
"""Steps in a row that a lasting cause must hold in."""

_MOST_SPELLED_OUT = 0.4
_LEAST_FINISHED = 0.5
_ERRORS = "rollout/errors/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A reason why a run learns nothing, or less than it could."""

    topic: str
    """Each topic is reported once."""
    text: str
    """The fault in numbers, and its remedy."""


def is_void(metrics: Metrics) -> bool:
    """Whether nothing that a step played counts."""
    return metrics.get("rollout/groups", 0) > 0 and metrics.get("rollout/void") == metrics["rollout/groups"]


def told_causes(rows: Sequence[Metrics]) -> list[tuple[int, Cause]]:
    """All causes of a run, each at the step that showed it first, by the step's place among the rows with rollouts."""
    played = [row for row in rows if row.get("rollout/groups")]
    told: dict[str, tuple[int, Cause]] = {}
    for place in range(len(played)):
        window = played[max(0, place + 1 - WINDOW) : place + 1]
        for cause in causes(window, is_whole_run=place + 1 == len(played) < WINDOW):
            told.setdefault(cause.topic, (place, cause))
    return list(told.values())


def causes(rows: Sequence[Metrics], *, is_whole_run: bool = False) -> list[Cause]:
    """Causes that keep a run from learning.

    ``rows`` are the metrics of the last steps with rollouts, up to `WINDOW`; fewer are enough where they are all.
    """
    found = [cause for check in _AT_ONCE if rows and (cause := check(rows[-1])) is not None]
    if len(rows) < WINDOW and not (is_whole_run and rows):
        return found
    known = [cause for check in _LASTING if (cause := check(rows)) is not None][:1]
    if not found and not known and (flat := _flat(rows)) is not None:
        known = [flat]
    return [*found, *known]


def _spelled_out(row: Metrics) -> Cause | None:
    share = row.get(SPELLED_OUT, 0.0)
    if share <= _MOST_SPELLED_OUT:
        return None
    return Cause(
        topic="unreadable prompts",
        text=f"the model cannot read its task: {share:.0%} of the words of the prompts are unknown to its tokenizer "
        "and reach it letter by letter. The built-in policy (model_name=tiny) knows arithmetic word problems alone, as "
        "'make demo-tiny' trains it on; choose a pretrained model for other prompts.",
    )


def _judge(row: Metrics) -> Cause | None:
    invalid = row.get("void/judge/invalid_rate")
    if invalid is None or not row.get(_ERRORS + NoValidComparisonsError.__name__):
        return None
    text = (
        "conversations have no reward, and nothing is learned from those: "
        f"{invalid:.0%} of the judge's comparisons in them are invalid. "
    )
    mass = row.get("void/judge/off_set_mass")
    if mass is None:
        text += (
            "Its replies hold no verdict that can be read, as those of a model that does not follow instructions yet. "
            "Choose judge_mode=logprob, a higher judge_max_tokens, or a model that does."
        )
    else:
        text += (
            f"Where its verdict should begin, it gives {mass:.1%} of the probability to other tokens than the labels, "
            "more than judge_max_off_set_mass allows. A model with random weights, or one that does not know the "
            "format, judges so. Choose judge_max_off_set_mass=1.0, which compares the labels however improbable they "
            "are, judge_mode=verdict, or a model that follows instructions."
        )
    return Cause(topic="judge", text=text)


def _context(row: Metrics) -> Cause | None:
    count = row.get(_ERRORS + PromptTooLongError.__name__, 0)
    if not count:
        return None
    return Cause(
        topic="context",
        text=f"{count:.0f} prompts left no room for a reply in the model's context, so their conversations do not "
        "count. Use shorter prompts, fewer rounds or agents, a smaller max_tokens, or a model with a longer context.",
    )


def _void(rows: Sequence[Metrics]) -> Cause | None:
    if not all(map(is_void, rows)):
        return None
    errors = {
        name.removeprefix(_ERRORS): value for name, value in rows[-1].items() if name.startswith(_ERRORS)
    }
    why = max(errors, key=lambda name: errors[name]) if errors else "unknown reasons"
    return Cause(
        topic="all void",
        text=f"every conversation of {_steps(rows)} is void (mostly {why}): nothing is trained. The transcripts have "
        "the reason of each ('viva view' shows them, state void); what failed most is the place to begin.",
    )


def _cut(rows: Sequence[Metrics]) -> Cause | None:
    shares = [row["rollout/finish_rate"] for row in rows if "rollout/finish_rate" in row]
    if len(shares) < len(rows) or max(shares) >= _LEAST_FINISHED:
        return None
    return Cause(
        topic="cut replies",
        text=f"{1 - shares[-1]:.0%} of the replies are cut at max_tokens before they end, and answers mostly stand at "
        "the end. Raise max_tokens, ask for shorter replies, or check that renderer_name knows the model's end of a "
        "turn.",
    )


def _format(rows: Sequence[Metrics]) -> Cause | None:
    def kept(row: Metrics) -> float | None:
        if "parse/unstructured" in row:
            return 1 - row["parse/unstructured"]
        return row.get("format")

    if any(kept(row) != 0 for row in rows):
        return None
    return Cause(
        topic="format",
        text=f"not one reply of {_steps(rows)} had the form that was asked for. Show an example of it in the prompt, "
        "take a model that follows instructions, or look at what it writes instead ('viva view').",
    )


def _flat(rows: Sequence[Metrics]) -> Cause | None:
    """Rewards that are equal within every group, by what they are equal to."""
    if not all(row.get("advantage/silent_groups_share", 1.0) == 1.0 for row in rows) or any(
        "reward/mean" not in row for row in rows
    ):
        return None
    for name in ("correct/final", "correct"):
        values = {row.get(name) for row in rows}
        if values == {0.0}:
            return Cause(
                topic="all wrong",
                text=f"every answer of {_steps(rows)} is wrong, so all rewards of a group are equal and nothing is "
                "trained. Take easier prompts or a model that solves some of them, sample more often (a larger group), "
                "show a worked example in the prompt, or check that the grader reads the answers ('viva view').",
            )
        if values == {1.0}:
            return Cause(
                topic="all right",
                text=f"every answer of {_steps(rows)} is right, so all rewards of a group are equal and nothing is "
                "left to learn here. Take harder prompts.",
            )
    equal = {(row.get("reward/min"), row.get("reward/max")) for row in rows}
    low, high = next(iter(equal))
    what = (
        f"every reward of {_steps(rows)} is {low:g}"
        if len(equal) == 1 and low == high
        else "rewards differ between groups only"
    )
    return Cause(
        topic="no spread",
        text=f"{what}: replies to the same prompt all earn the same, and nothing is trained. Take prompts that some "
        "replies solve and others do not, a larger group, a higher temperature, or a reward with more steps between "
        "its lowest and its highest value. Votes that tell no solutions apart pay all alike (solution_floor says which "
        "do, in critique self-play): 'viva screen' tells whether the model's votes know anything.",
    )


def _steps(rows: Sequence[Metrics]) -> str:
    return "the only step" if len(rows) == 1 else f"{len(rows)} steps in a row"


_AT_ONCE = (_spelled_out, _judge, _context)
_LASTING = (_void, _cut, _format)
"""Each explains those after it."""
