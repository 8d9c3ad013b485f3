"""The rewards ``r_sol``, ``r_meta`` and ``r_diag``: one stream of peer review alone (CoNL, arXiv 2601.21464).

Scores, votes and credit are those of ``peer_review`` (`viva.rewards.critique`, `viva.rewards.review`). With V in [0, 1]
the scores of first and revised solutions, ``R_i`` agent i's final votes and ``T_i`` the agents that it criticised,

    r_sol(i)  = V_i^final                                           tokens of the revision; of the proposal by its rules
    r_meta(i) = 1/|R_i| sum over (a, b) in R_i of 1[Pref_i(a, b) = Maj(a, b)]              tokens of the final ranking
    r_diag(i) = sum over k in T_i of max(0, V_k^final - V_k^init)                                tokens of the critiques

with the changes that the ``robust`` preset makes (`viva.rewards.review.ReviewRules`). The stream's weight is 1, that of
the others 0: their tokens train nothing. The transcript keeps all three.
"""

from dataclasses import replace
from typing import Any

from viva.rewards.critique import PeerReview, peer_review
from viva.rewards.review import STREAMS


def only(stream: str, reward: PeerReview) -> PeerReview:
    """A peer review that pays one stream, by the same rules.

    Raises:
        ValueError: If there is no such stream.
    """
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
