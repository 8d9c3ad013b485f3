"""What judges say of two policies, as a table: the judges side by side."""

from collections.abc import Mapping, Sequence

from viva.eval.records import Figure
from viva.view.files import text_table

_LEGEND = {
    "win_rate": "win_rate: points of the first policy, a tie counting half; shown_first, shown_second: by its place; "
    "length_controlled: at equal length; expected: by the judge's probabilities",
    "flip_rate": "flip_rate: winners that change with the order; first_shown_rate: verdicts for the answer shown "
    "first; longer_rate: for the longer one; 50 % of these two is no preference",
    "failed_rate": "invalid_rate, failed_rate: of comparisons asked; they count for nobody",
    "accuracy": "accuracy: verdicts for the right answer, of a right and a wrong one",
    "kappa": "agreement, kappa: of both judges, pair by pair (Cohen's kappa: 0 is chance)",
}


def judged_text(figures: Mapping[str, Figure], judges: Sequence[str], notes: Sequence[str]) -> str:
    """The figures of `viva.eval.judged.figures_of_judges` as tables.

    Args:
        figures: By name.
        judges: Names, in the order of the columns.
        notes: Lines below them.
    """
    keys = [
        name.removeprefix(f"judge/{judges[0]}/") for name in figures if name.startswith(f"judge/{judges[0]}/")
    ]
    keys += [
        key
        for name in judges[1:]
        for each in figures
        if each.startswith(f"judge/{name}/") and (key := each.removeprefix(f"judge/{name}/")) not in keys
    ]
    rows = [("judged by", *(cell for name in judges for cell in (name, "95 % interval")), "prompts")]
    for key in keys:
        found = [figures.get(f"judge/{name}/{key}") for name in judges]
        most = max(figure.num_problems for figure in found if figure is not None)
        rows.append((key, *(cell for figure in found for cell in _cells(key, figure)), str(most)))
    lines = text_table(rows)
    between = [(name, figure) for name, figure in figures.items() if name.startswith("judges/")]
    if between:
        told = [("between judges", "value", "95 % interval", "prompts")]
        told += [
            (name.removeprefix("judges/"), *_cells(name, figure), str(figure.num_problems))
            for name, figure in between
        ]
        lines += ["", *text_table(told)]
    lines += ["", *(text for mark, text in _LEGEND.items() if any(mark in name for name in figures))]
    return "\n".join([*lines, *notes]) + "\n"


def _cells(name: str, figure: Figure | None) -> tuple[str, str]:
    if figure is None or figure.value is None:
        return "-", "-"
    if figure.low is None or figure.high is None:
        return _told(name, figure.value), "-"
    return _told(name, figure.value), f"{_told(name, figure.low)} to {_told(name, figure.high)}"


def _told(name: str, value: float) -> str:
    return f"{value:+.2f}" if name.endswith("kappa") else f"{100 * value:.1f} %"
