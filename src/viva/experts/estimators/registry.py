"""The registry: every estimator by name."""

from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from viva.experts.estimators.balance import Balance
from viva.experts.estimators.base import Estimator
from viva.experts.estimators.distill import Distill
from viva.experts.estimators.importance_sampling import ImportanceSampling
from viva.experts.estimators.none import NoCorrection
from viva.experts.estimators.positives import Positives
from viva.experts.estimators.seq_is import SequenceIS
from viva.experts.estimators.seq_tis import SequenceTIS
from viva.experts.estimators.shaped import Shaped
from viva.experts.estimators.token_tis import TokenTIS

__all__ = ["DEFAULT_ESTIMATOR", "ESTIMATORS", "make_estimator"]

ESTIMATORS: dict[str, type[Estimator]] = {
    each.name: each
    for each in (
        ImportanceSampling,
        TokenTIS,
        Balance,
        NoCorrection,
        Positives,
        Shaped,
        SequenceTIS,
        SequenceIS,
        Distill,
    )
}
"""Every estimator by name."""

DEFAULT_ESTIMATOR = Shaped.name
"""Chosen from the tables in docs/estimators.md."""


def make_estimator(name: str, **options: float | str | bool) -> Estimator:
    """An estimator by name, with its own options (``token_tis`` has ``cap``, and so on).

    Raises:
        ValueError: If there is no such estimator, if it has no such option, or if a value makes no sense for it.
    """
    if name not in ESTIMATORS:
        raise ValueError(f"there is no estimator {name!r}; choose from {', '.join(ESTIMATORS)}")
    kind = ESTIMATORS[name]
    known = {each.name: each for each in fields(kind)}
    if unknown := sorted(set(options) - set(known)):
        has = f"has the options {', '.join(known)}" if known else "has no options"
        raise ValueError(f"{name} has no option {unknown[0]!r}; it {has}")
    required = {key for key, each in known.items() if each.default is MISSING}
    if missing := sorted(required - set(options)):
        raise ValueError(f"{name} needs the option {missing[0]!r}; see its documentation")
    for key, hint in get_type_hints(kind).items():
        if key in options and not _fits(options[key], hint):
            raise ValueError(f"{name}: {key} must be {_WORDS.get(hint, 'a value')}; got {options[key]!r}")
    return kind(**options)


_WORDS: dict[Any, str] = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}


def _fits(value: float | str | bool, hint: Any) -> bool:
    """Whether an option's value is of the declared type; a whole number is a number, a truth value is none."""
    if hint not in _WORDS:
        return True
    wanted = (int, float) if hint is float else hint
    return isinstance(value, wanted) and isinstance(value, bool) == (hint is bool)
