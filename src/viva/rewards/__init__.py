"""Rewards of conversations by name, and what the tokens of a conversation earn by them."""

import inspect
from difflib import get_close_matches
from typing import Any, cast

from viva.rewards.base import FunctionReward, Pay, Reward, RewardFunction
from viva.rewards.critique import PeerReview, peer_review
from viva.rewards.pairwise import Tournament, tournament

__all__ = [
    "FunctionReward",
    "Pay",
    "PeerReview",
    "Reward",
    "RewardFunction",
    "Tournament",
    "find_reward",
    "peer_review",
    "tournament",
]

_NAMED = {"peer_review": peer_review, "tournament": tournament}


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
        close = get_close_matches(value, _NAMED, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"unknown reward {value!r}; allowed: {', '.join(_NAMED)}, a function of the conversation, or on the "
            f"command line path.py:FUNCTION.{hint}"
        )
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
