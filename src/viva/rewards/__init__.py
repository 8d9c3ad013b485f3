"""Rewards of conversations by name, and what the tokens of a conversation earn by them."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from viva.conversation.messages import unknown
from viva.judging.judge import JudgeOptions
from viva.rewards.answers import answers
from viva.rewards.base import Reward
from viva.rewards.comas import comas
from viva.rewards.critique import PeerReview
from viva.rewards.function import FunctionReward, Pay, RewardFunction
from viva.rewards.judge_answer import judge_answer
from viva.rewards.log_probability import log_probability
from viva.rewards.maca import maca
from viva.rewards.majority import majority, majority_first
from viva.rewards.pairwise import Tournament, tournament
from viva.rewards.peer_prediction import peer_prediction
from viva.rewards.review import review_rules
from viva.rewards.rubric import rubric
from viva.rewards.serl import serl, serl_votes
from viva.rewards.shuffled import Shuffled

__all__ = [
    "FunctionReward",
    "Pay",
    "PeerReview",
    "Reward",
    "RewardFunction",
    "Shuffled",
    "Tournament",
    "answers",
    "comas",
    "find_reward",
    "judge_answer",
    "log_probability",
    "maca",
    "majority",
    "majority_first",
    "peer_prediction",
    "peer_review",
    "r_diag",
    "r_meta",
    "r_sol",
    "rubric",
    "serl",
    "serl_votes",
    "shuffled",
    "tournament",
]


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


def r_sol(**options: Any) -> PeerReview:
    """The score of an agent's solution alone; options are those of `viva.rewards.peer_review` but for weights."""
    return peer_review(**options).only("r_sol")


def r_meta(**options: Any) -> PeerReview:
    """Agreement with the others' final votes alone; options are those of `viva.rewards.peer_review` but for weights."""
    return peer_review(**options).only("r_meta")


def r_diag(**options: Any) -> PeerReview:
    """Useful critique alone; options are those of `viva.rewards.peer_review` but for weights."""
    return peer_review(**options).only("r_diag")


def shuffled(of: object = "answers") -> Shuffled:
    """Any reward permuted within its group by the run's seed: a control that must not learn.

    Args:
        of: The reward, as `find_reward` takes it. On the command line it is part of the name: ``shuffled_tournament``.

    Raises:
        ValueError: If it is no reward.
    """
    return Shuffled(of=find_reward(of))


_NAMED = {
    "answers": answers,
    "comas": comas,
    "judge_answer": judge_answer,
    "log_probability": log_probability,
    "maca": maca,
    "majority": majority,
    "majority_first": majority_first,
    "peer_prediction": peer_prediction,
    "peer_review": peer_review,
    "r_diag": r_diag,
    "r_meta": r_meta,
    "r_sol": r_sol,
    "rubric": rubric,
    "serl": serl,
    "serl_votes": serl_votes,
    "shuffled": shuffled,
    "tournament": tournament,
}

NAMES = tuple(_NAMED)


def find_reward(value: object) -> Reward:
    """The reward that a value stands for.

    Args:
        value: A name, a `Reward`, or a user's function of the `Conversation`, see `FunctionReward`.

    Raises:
        ValueError: If it is nothing of that.
    """
    if isinstance(value, Reward):
        return value
    if isinstance(value, str):
        if value in _NAMED:
            return _NAMED[value]()
        if value.startswith("shuffled_"):
            return shuffled(value.removeprefix("shuffled_"))
        also = ", a function of the conversation, or on the command line path.py:FUNCTION"
        raise ValueError(unknown("reward", value, _NAMED, also=also))
    if not callable(value):
        got = "none" if value is None else type(value).__name__
        raise ValueError(
            f"a reward must be a name ({', '.join(_NAMED)}), one of viva.rewards, or a function of the conversation; "
            f"got {got}. Give Protocol(reward=...) or reward=..."
        )
    try:
        inspect.signature(value).bind(object())
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the reward {value!r} must be a function of the conversation alone: {error}"
        ) from error
    name = cast(Any, value).__name__ if hasattr(value, "__name__") else type(value).__name__
    return FunctionReward(function=cast(RewardFunction, value), name=name)
