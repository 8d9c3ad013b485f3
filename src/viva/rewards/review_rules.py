"""How critique self-play turns votes into rewards: every choice a field, every preset only values."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["PRESETS", "STREAMS", "ReviewRules", "review_rules"]

STREAMS: Mapping[str, float] = {"r_sol": 1.0, "r_meta": 1.0, "r_diag": 2.0}
"""The reward streams and their weights in the paper (arXiv 2601.21464)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewRules:
    """The choices; the defaults are those of the ``robust`` preset."""

    fit: Literal["separate", "joint"] = "joint"
    """``separate``: initial and final ballots are fitted each on its own scale. Both scales have mean 0, so where
    everybody improves by the same amount, nobody gains. ``joint``: one fit over all 2N solutions. What links the two
    rounds are comparisons of revised with initial solutions, and solutions that did not change."""
    meta: Literal["majority", "leave_one_out"] = "leave_one_out"
    """``majority``: the share of a voter's votes that agree with the majority of all, itself included, as in the paper.
    ``leave_one_out``: with that of the others, where they have one. See `viva.judging.consensus.agreement`."""
    diag: Literal["sum", "mean"] = "mean"
    """Over a critic's distinct targets. A sum pays for naming more of them."""
    diag_credit: Literal["reply", "target"] = "target"
    """What the tokens of a critique earn: the critic's r_diag, or the gain of the target it is about."""
    noise_floor: float = 1.0
    """Gains smaller than so many of their standard errors pay nothing."""
    initial_earns: Literal["final", "initial"] = "initial"
    """The score that the initial solution earns: ``final`` is that of the revised one, as in the paper, which pays a
    weak draft that others rescued as much as a strong one. ``initial`` is its own."""
    identical: Literal["apart", "one_item"] = "one_item"
    """Solutions with the same words: ``apart`` lets votes between them count, which can only be noise. ``one_item``
    makes them one item, with one score. In a ``joint`` fit an agent that did not change anything gains exactly 0."""
    prior_precision: float = 1.0
    """Of the Bradley-Terry fit, in units of one vote."""
    weights: Mapping[str, float] = field(default_factory=lambda: dict(STREAMS))
    """Of the streams."""

    def __post_init__(self) -> None:
        """Reject rules that say nothing.

        Raises:
            ValueError: If a choice is none of those allowed.
        """
        allowed: dict[str, tuple[str, ...]] = {
            "fit": ("separate", "joint"),
            "meta": ("majority", "leave_one_out"),
            "diag": ("sum", "mean"),
            "diag_credit": ("reply", "target"),
            "initial_earns": ("final", "initial"),
            "identical": ("apart", "one_item"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {', '.join(values)}; got {getattr(self, name)!r}")
        if not 0.0 <= self.noise_floor < math.inf:
            raise ValueError(f"noise_floor must be a finite number of at least 0; got {self.noise_floor}")
        if not 0.0 < self.prior_precision < math.inf:
            raise ValueError(f"prior_precision must be a positive number; got {self.prior_precision}")
        if set(self.weights) != set(STREAMS) or not all(map(math.isfinite, self.weights.values())):
            raise ValueError(
                f"weights must give a finite number for each of {', '.join(STREAMS)}; got {dict(self.weights)}"
                f"{_about_unknown(set(self.weights) - set(STREAMS))}"
            )


def _about_unknown(names: Iterable[str]) -> str:
    """What is wrong with names that are no streams, and which ones may be meant."""
    hints: list[str] = []
    for name in sorted(names):
        close = difflib.get_close_matches(name, STREAMS, n=1)
        hints.append(f"; unknown: {name!r}" + (f", did you mean {close[0]!r}?" if close else ""))
    return "".join(hints)


PRESETS: Mapping[str, ReviewRules] = {
    "paper": ReviewRules(
        fit="separate",
        meta="majority",
        diag="sum",
        diag_credit="reply",
        noise_floor=0.0,
        initial_earns="final",
        identical="apart",
    ),
    "robust": ReviewRules(),
}
"""``paper``: the rewards of arXiv 2601.21464. ``robust``: what its weaknesses call for."""


def review_rules(preset: str) -> ReviewRules:
    """The rules of a preset; change single ones with ``dataclasses.replace``.

    Raises:
        ValueError: If there is no such preset.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {preset!r}")
    return PRESETS[preset]
