"""Votes without words: what an agent is asked about each pair of solutions, and which pairs.

The policy, told that it is the agent, is shown two solutions as A and B and made to begin its verdict; the
probabilities of the labels A, B and Tie at that place are the vote (`viva.judging.label_ballots`). For models that
cannot write a ranking that can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from viva.conversation.critiques import may_vote_on_own
from viva.conversation.personas import introduction
from viva.conversation.protocol import Segment, View
from viva.conversation.records import Solution, Turn

PAIR_REQUEST = """\
Which solution is better, A or B? Reply with one JSON object and nothing else: {"preference": "A", "B" or "Tie"}"""


def pair_instruction(view: View) -> str:
    """The request behind a pair: persona, question, and the form that the labels need."""
    return f"{introduction(view.persona)} {PAIR_REQUEST}"


def rivals(
    turns: Sequence[Turn], view: View, *, votes_on_own: bool | None = None
) -> dict[int | tuple[str, int], str]:
    """Solutions that an agent votes on, by agent id: each one's last that it is shown, without its own.

    Args:
        turns: What it is shown.
        view: Its place.
        votes_on_own: See `viva.conversation.critiques.may_vote_on_own`.
    """
    texts = {turn.agent_id: turn.response.solution for turn in turns if isinstance(turn.response, Solution)}
    keeps_own = may_vote_on_own(view, votes_on_own)
    return {
        agent_id: texts[agent_id]
        for agent_id in sorted(set(texts) & set(view.aliases))
        if keeps_own or agent_id != view.agent_id
    }


def label_vote(name: str, *, votes_on_own: bool | None = None) -> Segment:
    """A segment in which agents vote by label probabilities on the solutions that the round shows them.

    Args:
        name: Of the segment.
        votes_on_own: Whether agents vote on their own solution; ``None``: only in a round of two, who have no other.
    """
    return Segment(
        name=name,
        instruction=pair_instruction,
        votes_on=partial(rivals, votes_on_own=votes_on_own),
        stream=None,
    )
