"""Which sampled tokens of a critique conversation earned which reward.

    round 0  proposal   the whole reply                 r_sol of the initial solution
    round 1  ranking    masked                          -
    round 1  critique   each critique's own tokens      the gain of its target (or the reply, r_diag)
    round 2  revision   the whole reply                 r_sol
    round 3  verdict    the whole reply                 r_meta; nothing if no vote could be compared

What cannot be located on the sampled ids earns nothing.
"""

from collections.abc import Iterator, Sequence

from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.rl.types import Trajectory

from viva.conversation.protocol import Protocol
from viva.conversation.records import Conversation, CritiqueReply, Turn
from viva.rewards.review import ReviewScores
from viva.rewards.review_rules import ReviewRules
from viva.rewards.spans import token_ranges
from viva.rewards.streams import SpanCredit

__all__ = ["review_spans"]


def review_spans(
    conversation: Conversation,
    protocol: Protocol,
    scores: ReviewScores,
    rules: ReviewRules,
    trajectories_G: Sequence[Trajectory],
    renderer: Renderer,
) -> Iterator[SpanCredit]:
    """Spans and rewards of one conversation, in order of seat and turn.

    Args:
        conversation: What was said.
        protocol: Its protocol; tells which segment earns which stream.
        scores: Its rewards.
        rules: How critiques are credited.
        trajectories_G: The sampled tokens by seat.
        renderer: The one that read the replies.

    Raises:
        ValueError: If a seat of an agent that finished does not have one transition for each of its turns.
    """
    for seat, (agent_id, lane) in enumerate(protocol.seats(conversation.num_agents)):
        if agent_id not in scores.totals:
            continue
        turns = [turn for turn in conversation.turns if (turn.agent_id, turn.lane) == (agent_id, lane)]
        transitions = trajectories_G[seat].transitions
        if len(turns) != len(transitions):
            raise ValueError(
                f"agent {agent_id} took {len(turns)} turns in lane {lane}, but its trajectory has "
                f"{len(transitions)} transitions; give the trajectories of this conversation in seat order"
            )
        for index, (turn, transition) in enumerate(zip(turns, transitions, strict=True)):
            stream = protocol.rounds[turn.round_index].segments[lane].stream
            if stream is None:
                continue
            for start, stop, reward in _earned(turn, scores, rules, transition.ac.tokens, renderer):
                yield SpanCredit(
                    seat=seat,
                    transition=index,
                    start=start,
                    stop=stop,
                    stream=stream,
                    round_index=turn.round_index,
                    reward=reward,
                )


def _earned(
    turn: Turn, scores: ReviewScores, rules: ReviewRules, tokens_T: Sequence[int], renderer: Renderer
) -> Iterator[tuple[int, int, float]]:
    """Token ranges of one reply and what each earned."""
    if isinstance(turn.response, CritiqueReply):
        paid = scores.r_diag_by_target[turn.agent_id]
        critiques = [critique for critique in turn.response.critiques if critique.target in paid]
        if rules.diag_credit == "target":
            ranges = [(critique.start, critique.stop) for critique in critiques]
            for critique, span in zip(
                critiques, token_ranges(renderer, tokens_T, turn.text, ranges), strict=True
            ):
                if span is not None:
                    yield *span, paid[critique.target]
            return
        reward = scores.r_diag[turn.agent_id] if critiques else None
    else:
        by_segment = {
            "proposal": scores.r_sol_initial,
            "revision": scores.r_sol,
            "verdict": scores.r_meta,
        }
        reward = by_segment[turn.segment][turn.agent_id]
    if reward is not None and tokens_T:
        yield 0, len(tokens_T), reward
