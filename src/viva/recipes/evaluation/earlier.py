"""Evaluations of earlier: shown again, and compared, without sampling anything."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz

from viva.eval.bootstrap import compare
from viva.eval.figures import figures_of
from viva.eval.records import Difference, Evaluation
from viva.eval.stored import read_evaluation, write_comparison
from viva.eval.table import comparison_text, evaluation_text
from viva.recipes.evaluation.options import EvalOptions
from viva.recipes.evaluation.plan import check_output
from viva.training.seeds import derive_seed

__all__ = [
    "check_comparable",
    "compare_files",
    "differences_of",
    "draws_seed",
    "is_result_file",
    "read_stored",
]


def is_result_file(name: str) -> bool:
    """Whether a target is the file of an earlier evaluation."""
    return name.endswith(".json") and Path(name).expanduser().is_file()


def read_stored(name: str) -> Evaluation:
    """The evaluation of a file.

    Raises:
        ValueError: If it is none.
    """
    return read_evaluation(Path(name).expanduser())


def draws_seed(record: dict[str, Any]) -> int:
    """Seed of the bootstrap: the same draws for every policy that is asked the same."""
    return derive_seed(int(record["seed"]), "bootstrap")


def compare_files(name: str, other: str | None, options: EvalOptions) -> str:
    """Show an earlier evaluation, or compare two; nothing is sampled.

    Raises:
        ValueError: If a file is no evaluation, or options were given that would ask for samples.
    """
    ignored = [
        key
        for key, value in chz.asdict(options).items()
        if key not in ("against", "output", "resamples") and value != getattr(EvalOptions(), key)
    ]
    if ignored or (other is None and options.output is not None):
        raise ValueError(
            f"{name} is the file of an earlier evaluation, of which nothing is sampled again: only against=FILE, and "
            f"with it output=... and resamples=..., can be given; got {', '.join(ignored) or 'output'}"
        )
    check_output(options.output)
    evaluation = read_stored(name)
    if other is None:
        return evaluation_text(evaluation)
    if not is_result_file(other):
        raise ValueError(
            f"{name} is the file of an earlier evaluation and can be compared with another such file only; "
            f"got against={other}"
        )
    against = read_stored(other)
    check_comparable(evaluation.options, evaluation.prompts_digest, against)
    differences = differences_of(evaluation, against, options.resamples)
    if options.output is not None:
        write_comparison(Path(options.output).expanduser(), evaluation, against, differences)
    return comparison_text(evaluation, against, differences)


def differences_of(evaluation: Evaluation, against: Evaluation, resamples: int) -> dict[str, Difference]:
    """What two evaluations of the same problems differ in, from paired draws."""
    return compare(
        figures_of(evaluation), figures_of(against), resamples=resamples, seed=draws_seed(evaluation.options)
    )


def check_comparable(record: dict[str, Any], digest: str, stored: Evaluation) -> None:
    """Refuse a stored evaluation of other problems, or by other options, than those to be compared with it.

    Raises:
        ValueError: See above.
    """
    if stored.prompts_digest != digest:
        raise ValueError(
            f"the stored evaluation of {stored.target['name']} is of other problems; evaluate it anew"
        )
    now, then = (_plain(each) for each in (record, stored.options))
    names = _differing(now, then)
    if names:
        raise ValueError(
            f"the stored evaluation of {stored.target['name']} was made with other options: "
            f"{', '.join(f'{name} was {then.get(name)!r} and is {now.get(name)!r}' for name in names)}"
        )


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """As JSON reads it back; how often is drawn for intervals decides nothing."""
    content: dict[str, Any] = json.loads(json.dumps(record))
    return {name: value for name, value in content.items() if name != "resamples"}


def _differing(one: dict[str, Any], other: dict[str, Any]) -> Sequence[str]:
    return [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
