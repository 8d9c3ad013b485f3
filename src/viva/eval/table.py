"""Evaluations and comparisons as text for the terminal."""

from collections.abc import Mapping, Sequence

from viva.conversation.wording import counted
from viva.eval.records import Difference, Evaluation, Figure

__all__ = ["comparison_text", "evaluation_text"]

_LEGEND = {
    "avg@": "avg@n: share of right answers",
    "pass@": "pass@k: at least one of k is right",
    "maj@": "maj@k: the most frequent of k is right",
    "correct/": "correct/first, /final: all agents' answers, before and after; /best: the one with the highest score",
    "flip/": "flip: what the conversation did to right and to wrong answers",
    "rank_correlation": "rank_correlation: of scores with being right, where some are right and some wrong",
    "reward_truth_gap": "reward_truth_gap: pairs in which the wrong answer has the higher score; 50 % knows nothing",
    "equal_tokens/": "equal_tokens: direct answers within the tokens of the conversation, judge included",
}


def evaluation_text(evaluation: Evaluation) -> str:
    """All figures with their 95 % intervals."""
    rows = [("figure", "value", "95 % interval", "problems")]
    for name, figure in evaluation.figures.items():
        rows.append((name, _shown(name, figure.value), _interval(name, figure), str(figure.num_problems)))
    lines = [
        f"{_title(evaluation)}, {_size(evaluation)}",
        *([f"measured on {evaluation.problems}"] if evaluation.problems else []),
        "",
        *_table(rows),
        "",
        *_legend(evaluation.figures),
    ]
    lines += _void_lines(evaluation)
    return "\n".join(lines) + "\n"


def comparison_text(
    evaluation: Evaluation, against: Evaluation, differences: Mapping[str, Difference]
) -> str:
    """Figures of two policies side by side, with 95 % intervals of the differences."""
    rows = [("figure", "first", "second", "difference", "95 % interval")]
    for name, each in differences.items():
        rows.append(
            (
                name,
                _shown(name, each.value),
                _shown(name, each.against),
                _shown(name, each.difference, sign="+"),
                _interval(name, each, sign="+"),
            )
        )
    return (
        "\n".join(
            [
                f"first:  {_title(evaluation)}",
                f"second: {_title(against)}",
                "differences are first less second, on the same problems",
                "",
                *_table(rows),
            ]
        )
        + "\n"
    )


def _title(evaluation: Evaluation) -> str:
    target = evaluation.target
    checkpoint = target.get("checkpoint")
    return f"{target['name']}, checkpoint {checkpoint}" if checkpoint else str(target["name"])


def _size(evaluation: Evaluation) -> str:
    parts: list[str] = []
    if evaluation.asked:
        times = len(evaluation.asked[0].answers)
        parts.append(
            f"{counted(len(evaluation.asked), 'problem')} asked directly {f'{times} times' if times > 1 else 'once'}"
        )
    parts += [
        f"{len(played)} in {kind} of {counted(len(played[0].agents), 'agent')}"
        for kind, played in evaluation.played.items()
    ]
    return ", ".join(parts)


def _void_lines(evaluation: Evaluation) -> list[str]:
    lines: list[str] = []
    for kind, played in evaluation.played.items():
        reasons = [each.void_reason for each in played if each.void_reason is not None]
        if reasons:
            lines.append(
                f"note: {len(reasons)} of {len(played)} {kind} void and counted as wrong: {reasons[0]}"
            )
    return lines


def _legend(figures: Mapping[str, Figure]) -> list[str]:
    lines = [text for mark, text in _LEGEND.items() if any(mark in name for name in figures)]
    return [*lines, "intervals: resampled problems; - where all resampled values agree or there are too few"]


def _shown(name: str, value: float | None, *, sign: str = "") -> str:
    if value is None:
        return "-"
    if name.endswith(("tokens", "samples")):
        return f"{value:{sign}.1f}"
    if name.endswith("correlation"):
        return f"{value:+.2f}"
    signed = "+" if "_less_" in name else sign
    return f"{100 * value:{signed}.1f} %"


def _interval(name: str, figure: Figure | Difference, *, sign: str = "") -> str:
    if figure.low is None or figure.high is None:
        return "-"
    return f"{_shown(name, figure.low, sign=sign)} to {_shown(name, figure.high, sign=sign)}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]
