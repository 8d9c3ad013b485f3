"""Conversation preference RL: agents take turns, the policy compares their solutions, win minus loss pays.

In every round each agent replies once, with reflection, evaluation and solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from viva.conversation.prompts import (
    CONVERSATION_HEADING,
    CONVERSATION_SYSTEM_PROMPT,
    transcript,
    turn_instruction,
)
from viva.conversation.protocol import Order, Protocol, Reading, Round, Segment, Sight, View
from viva.conversation.records import Turn
from viva.conversation.replies import parse_reply

if TYPE_CHECKING:
    from tinker_cookbook.renderers.base import Renderer

    from viva.judging.comparison import TournamentPattern
    from viva.judging.judge import PolicySelfComparisonJudge
    from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder


def _read(text: str, view: View) -> Reading:
    parsed = parse_reply(text)
    return Reading(response=parsed.response, status=parsed.status, strategy=parsed.strategy)


def _instruction(view: View, *, max_rounds: int) -> str:
    return turn_instruction(
        view.persona, agent_id=view.agent_id, round_index=view.round_index, max_rounds=max_rounds
    )


def _show(turns: Sequence[Turn], view: View) -> str:
    return transcript(turns)


def round_robin_protocol(
    max_rounds: int,
    *,
    order: Order = "sequential",
    personas: dict[int, str] | None = None,
    on_failure: Literal["void", "continue"] = "void",
    min_agents: int = 2,
) -> Protocol:
    """The protocol of a conversation in turns.

    Its prompts are those of `viva.conversation.prompts.turn_prompt` and `conversation_messages`. All tokens earn
    the stream ``win_minus_loss``.

    Args:
        max_rounds: Turns of every agent.
        order: Who replies when.
        personas: Persona texts by agent id, see `viva.conversation.prompts.persona`.
        on_failure: What one agent's failure does to the conversation.
        min_agents: With fewer left, a conversation that would continue is over.

    Raises:
        ValueError: If the conversation could not be held.
    """
    if max_rounds < 1:
        raise ValueError(f"max_rounds must be at least 1; got max_rounds={max_rounds}")

    instruction = partial(_instruction, max_rounds=max_rounds)
    turn = Segment(name="turn", instruction=instruction, read=_read, stream="win_minus_loss")
    seen = Sight(segments=(turn.name,), whose="all", show=_show)
    protocol = Protocol(
        reward="tournament",
        name="round_robin",
        system_prompt=CONVERSATION_SYSTEM_PROMPT,
        rounds=tuple(
            Round(
                name=f"round {round_index + 1}",
                segments=(turn,),
                # in a simultaneous first round there is nothing to see
                sights=() if order == "simultaneous" and round_index == 0 else (seen,),
                order=order,
            )
            for round_index in range(max_rounds)
        ),
        personas=personas,
        on_failure=on_failure,
        min_agents=min_agents,
        heading=CONVERSATION_HEADING,
    )
    protocol.check()
    return protocol


def round_robin_group(
    *,
    question: str,
    renderer: Renderer,
    judge: PolicySelfComparisonJudge,
    max_rounds: int = 5,
    order: Order = "sequential",
    on_failure: Literal["void", "continue"] = "void",
    personas: dict[int, str] | None = None,
    tournament_pattern: TournamentPattern | str = "all_pairs_both_ways",
    **options: Any,
) -> MultiAgentConversationEnvGroupBuilder:
    """The builder of a conversation in turns that a tournament pays.

    Args:
        question: The problem.
        renderer: From `viva.conversation.rendering.load_renderer`.
        judge: Of the tournament.
        max_rounds: See `round_robin_protocol`.
        order: See there.
        on_failure: See there.
        personas: See there.
        tournament_pattern: Which pairs are compared.
        **options: Other fields of the builder.

    Raises:
        ValueError: If the conversation could not be held.
    """
    # a protocol alone is looked at without what plays it
    from viva.rewards.pairwise import tournament
    from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder

    return MultiAgentConversationEnvGroupBuilder(
        question=question,
        renderer=renderer,
        protocol=round_robin_protocol(max_rounds, order=order, personas=personas, on_failure=on_failure),
        reward=tournament(pattern=tournament_pattern),
        judge=judge,
        **options,
    )
