"""``peer_review`` and, one stream of it alone, ``r_sol``, ``r_meta`` and ``r_diag`` (CoNL, arXiv 2601.21464).

Scores, votes and credit are those of ``peer_review`` (`viva.rewards.critique`, `viva.rewards.review`). With V in [0, 1]
the scores of first and revised solutions, ``R_i`` agent i's final votes and ``T_i`` the agents that it criticised,

    r_sol(i)  = V_i^final                                           tokens of the revision; of the proposal by its rules
    r_meta(i) = 1/|R_i| sum over (a, b) in R_i of 1[Pref_i(a, b) = Maj(a, b)]              tokens of the final ranking
    r_diag(i) = sum over k in T_i of max(0, V_k^final - V_k^init)                                tokens of the critiques

with the changes that the ``robust`` preset makes (`viva.rewards.review.ReviewRules`). The stream's weight is 1, that of
the others 0: their tokens train nothing. The transcript keeps all three.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from viva.judging.judge import JudgeOptions
from viva.rewards.critique import PeerReview
from viva.rewards.review import STREAMS, review_rules


def peer_review(
    *,
    preset: str = "robust",
    weights: Mapping[str, float] | None = None,
    judge: JudgeOptions | None = None,
    **rules: Any,
) -> PeerReview:
    """The rewards of critique self-play: r_sol for solutions, r_meta for agreement, r_diag for useful critique.

    Args:
        preset: ``robust`` or ``paper``.
        weights: Weights of the streams that differ from the preset's.
        judge: Of the comparisons of revised with initial solutions; by default the policy being trained.
        **rules: Other fields of `viva.rewards.review.ReviewRules`.

    Raises:
        ValueError: If a value is none of those allowed.
    """
    chosen = review_rules(preset)
    chosen = replace(chosen, weights={**chosen.weights, **(weights or {})}, **rules)
    return PeerReview(rules=chosen, compared_by=judge or JudgeOptions())


def only(stream: str, reward: PeerReview) -> PeerReview:
    """A peer review that pays one stream, by the same rules; a `ValueError` if there is no such stream."""
    if stream not in STREAMS:
        raise ValueError(f"a stream of peer review is one of {', '.join(STREAMS)}; got {stream!r}")
    weights = {name: float(name == stream) for name in STREAMS}
    return replace(reward, rules=replace(reward.rules, weights=weights), name=stream)


def r_sol(**options: Any) -> PeerReview:
    """The score of an agent's solution alone; options are those of `viva.rewards.peer_review` but for weights."""
    return only("r_sol", peer_review(**options))


def r_meta(**options: Any) -> PeerReview:
    """Agreement with the others' final votes alone; options are those of `viva.rewards.peer_review` but for weights."""
    return only("r_meta", peer_review(**options))


def r_diag(**options: Any) -> PeerReview:
    """Useful critique alone; options are those of `viva.rewards.peer_review` but for weights."""
    return only("r_diag", peer_review(**options))
