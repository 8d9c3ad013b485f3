"""Tables of the bench from transcripts: the errors of scores by their distance, and shortcuts that groups agree on."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from evidence.tables import markdown
from viva.judging.comparison import reward_truth_gap
from viva.judging.records import ConversationRecord, Transcript

_BOUNDS = (0.0, 0.1, 0.5, 1.0, 2.0, math.inf)
"""Upper bounds of the rows, in standard errors; solutions in the same words have one score."""


def _apart(record: ConversationRecord) -> float:
    """The largest difference of two final scores, over the root of the sum of their squared standard errors."""
    scores, errors = record.scores.final, record.scores.final_error
    return max(
        abs(scores[one] - scores[other]) / math.hypot(errors[one], errors[other])
        for one, other in itertools.combinations(scores, 2)
    )


def _score_row(records: Sequence[ConversationRecord], share: float) -> str:
    """Share of the conversations, and pairs of a right and a wrong solution of which the right one is ahead."""
    gaps, num_pairs = [], 0
    for record in records:
        right = record.correct or {}
        pairs = sum(right.values()) * (len(right) - sum(right.values()))
        if (gap := reward_truth_gap(record.scores.final, right)) is not None:
            gaps.append((1.0 - gap) * pairs)
            num_pairs += pairs
    known = f"{100 * math.fsum(gaps) / num_pairs:.0f} % of {num_pairs}" if num_pairs else "-"
    return f"{100 * share:.0f} % | {known}"


def scores_table(paths: Iterable[Path]) -> str:
    """The conversations of runs with known answers, by `_apart`."""
    lines = (line for path in paths for line in path.read_text(encoding="utf-8").splitlines())
    read = (Transcript.model_validate_json(line).record for line in lines)
    records = [
        (_apart(record), record)
        for record in read
        if record is not None and record.correct and record.scores.final_error
    ]
    rows = ["| up to | conversations | right ahead |", "|---|---|---|"]
    lowest = -1.0
    for bound in _BOUNDS:
        own = [record for apart, record in records if lowest < apart <= bound]
        rows.append(f"| {bound:g} | {_score_row(own, len(own) / len(records))} |")
        lowest = bound
    return "\n".join(rows)


def shortcut_table(path: Path) -> str:
    """Groups of plain samples, by step: how many follow a shortcut, one operation on two numbers of the question."""
    steps: dict[int, list[tuple[float, list[bool], bool]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = Transcript.model_validate_json(line)
        if row.record is not None and row.rewards:
            answers = [turn.text.strip() for turn in row.record.turns]
            (most, _), *_ = Counter(answers).most_common(1)
            right = [answer == row.record.answer for answer in answers]
            is_shortcut = most != row.record.answer and most in _one_operation(row.record.question)
            reward = math.fsum(each or 0.0 for each in row.rewards) / len(row.rewards)
            steps.setdefault(row.step, []).append((reward, right, is_shortcut))
    rows = [["step", "reward", "right", "most frequent answer a shortcut"], ["---"] * 4]
    for step, groups in sorted(steps.items()):
        rewards, right, shortcuts = zip(*groups, strict=True)
        share = np.mean(list(itertools.chain.from_iterable(right)))
        told = f"{sum(shortcuts)} of {len(groups)}"
        rows.append([str(step), f"{np.mean(rewards):.2f}", f"{100 * share:.0f} %", told])
    return markdown(rows)


def _one_operation(question: str) -> set[str]:
    """Sums, differences and products of two of the question's numbers."""
    pairs = itertools.permutations(map(int, re.findall(r"\d+", question)), 2)
    return {str(value) for a, b in pairs for value in (a + b, a - b, a * b)}
