"""What the scores of critique self-play know, by how far they set the solutions of a conversation apart."""

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from viva.judging.bradley_terry import reward_truth_gap
from viva.judging.records import ConversationRecord, Transcript

BOUNDS = (0.0, 0.1, 0.5, 1.0, 2.0, math.inf)
"""Upper bounds of the rows, in standard errors; solutions in the same words have one score."""


def apart(record: ConversationRecord) -> float:
    """The largest difference of two final scores, over the root of the sum of their squared standard errors."""
    scores, errors = record.scores.final, record.scores.final_error
    return max(
        abs(scores[one] - scores[other]) / math.hypot(errors[one], errors[other])
        for one, other in itertools.combinations(scores, 2)
    )


def row_of(records: Sequence[ConversationRecord], share: float) -> str:
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
    """The conversations of runs with known answers, by `apart`."""
    lines = (line for path in paths for line in path.read_text(encoding="utf-8").splitlines())
    read = (Transcript.model_validate_json(line).record for line in lines)
    records = [
        record for record in read if record is not None and record.correct and record.scores.final_error
    ]
    rows = ["| up to | conversations | right ahead |", "|---|---|---|"]
    lowest = -1.0
    for bound in BOUNDS:
        own = [record for record in records if lowest < apart(record) <= bound]
        rows.append(f"| {bound:g} | {row_of(own, len(own) / len(records))} |")
        lowest = bound
    return "\n".join(rows)
