"""A stored conversation of critique self-play as the values it was scored from."""

from viva.conversation.records import (
    Conversation,
    CritiqueReply,
    Failure,
    Reply,
    ReplyStatus,
    Revision,
    Solution,
    Turn,
)
from viva.judging.comparison import Comparison, Outcome
from viva.judging.ranking import RankingReply
from viva.view.recorded import RecordedConversation, RecordedReply

__all__ = ["stored_comparisons", "stored_conversation"]


def stored_conversation(record: RecordedConversation) -> Conversation:
    """What was said.

    Raises:
        ValueError: If a turn has a status or decision that there is not.
    """
    return Conversation(
        question=record.question,
        num_agents=record.num_agents,
        max_rounds=record.max_rounds,
        turns=tuple(
            Turn(
                agent_id=turn.agent_id,
                round_index=turn.round_index,
                prompt=turn.prompt,
                text=turn.text,
                response=_reply(turn.response),
                status=ReplyStatus(turn.status),
                segment=turn.segment,
                lane=turn.lane,
            )
            for turn in record.turns
        ),
        failures=tuple(
            Failure(agent_id=failure.agent_id, round_index=failure.round_index, reason=failure.reason)
            for failure in record.failures
        ),
    )


def stored_comparisons(record: RecordedConversation) -> dict[int, list[Comparison]]:
    """The judge's comparisons of initial (item 0) with revised (item 1) solutions, by agent.

    Raises:
        ValueError: If an outcome is none that a comparison can have.
    """
    found: dict[int, list[Comparison]] = {}
    for item in record.comparisons:
        if item.agent_id is not None:
            comparison = Comparison(
                first=item.first,
                second=item.second,
                outcome=Outcome(item.outcome),
                score=item.score,
                text=item.text,
                probabilities=item.probabilities,
                off_set_mass=item.off_set_mass,
                was_asked=item.was_asked,
            )
            found.setdefault(item.agent_id, []).append(comparison)
    return found


def _reply(stored: RecordedReply) -> Reply:
    """The kind of reply that has the stored fields."""
    if stored.preferences is not None:
        return RankingReply(preferences=stored.preferences, dropped=stored.dropped)
    if stored.critiques is not None:
        return CritiqueReply(critiques=stored.critiques, dropped=stored.dropped)
    if stored.decision:
        return Revision.model_validate({"solution": stored.solution, "decision": stored.decision})
    return Solution(solution=stored.solution)
