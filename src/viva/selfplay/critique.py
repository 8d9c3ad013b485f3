"""Critique self-play (CoNL, arXiv 2601.21464): propose, rank blindly and criticise, revise or defend, final verdict.

    round      asks for                        sees                              earns
    propose    proposal                        nothing                           r_sol
    review     ranking | critique (parallel)   all proposals, under letters      nothing | r_diag
    revise     revision                        own proposal, critiques of it     r_sol
    verdict    verdict                         all revisions, under new letters  r_meta
    compare    comparison (an option)          both solutions of all others      nothing

The blind ranking earns nothing, so that nobody lowers a first score on purpose to raise the gain over it; nor does
the comparison, which puts first and revised solutions on one scale.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any, Literal

from viva.conversation.critique_prompts import (
    CRITIQUE_PERSONAS,
    CRITIQUE_SYSTEM_PROMPT,
    critique_instruction,
    proposal_instruction,
    ranking_instruction,
    revision_instruction,
    shown,
    shown_solution,
)
from viva.conversation.critiques import read_critiques, read_revision
from viva.conversation.protocol import Protocol, Reading, Round, Segment, Sight, View
from viva.conversation.records import CritiqueReply, Solution, Turn
from viva.judging.ballots import Item
from viva.judging.ranking import RankingReply, parse_ranking, ranking_status

if TYPE_CHECKING:
    from tinker_cookbook.renderers.base import Renderer

    from viva.judging.judge import PolicySelfComparisonJudge
    from viva.rewards.review import ReviewRules
    from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder

_STAGES = {"proposal": "initial", "revision": "revised"}
"""Segments that give a solution, and what it is called on a joint ballot."""


def critique_protocol(
    num_agents: int,
    *,
    personas: dict[int, str] | None = None,
    on_failure: Literal["void", "continue"] = "void",
    votes_on_own: bool | None = None,
    comparisons: bool = False,
) -> Protocol:
    """The protocol for a number of agents.

    Args:
        num_agents: At least 2; at most as many as there are letters for what they have to rank.
        personas: Persona texts by agent id; by default `CRITIQUE_PERSONAS`.
        on_failure: What one agent's failure does to the conversation. It goes on with at least two agents.
        votes_on_own: Whether agents rank their own solution, too; ``None``: only while the round has two agents,
            who could rank nothing otherwise.
        comparisons: Whether a last round has every agent rank the first and the revised solutions of all others
            against one another. Its votes are about ``("initial", agent)`` and ``("revised", agent)``.

    Raises:
        ValueError: If there are too few or too many agents, or the personas have gaps.
    """
    letters = len(ascii_uppercase)
    most = letters // 2 + 1 if comparisons else letters
    if not 2 <= num_agents <= most:
        raise ValueError(
            f"num_agents must be from 2 to {most}{' with comparisons' if comparisons else ''}, so that there is "
            f"somebody to criticise and a letter for everything that is ranked; got {num_agents}"
        )
    proposal = Segment(name="proposal", instruction=_propose, stream="r_sol")
    ranking = _ranking_segment("ranking", votes_on_own, stream=None)
    critique = Segment(name="critique", instruction=_criticise, read=read_critiques, stream="r_diag")
    revision = Segment(name="revision", instruction=_revise, read=read_revision, stream="r_sol")
    verdict = _ranking_segment("verdict", votes_on_own, stream="r_meta")
    own = Sight(segments=("proposal",), whose="own", show=_show_own)
    addressed = Sight(segments=("critique",), whose="addressed", show=_show_critiques)
    rounds = [
        Round(name="propose", segments=(proposal,)),
        Round(name="review", segments=(ranking, critique), sights=(_all_solutions("proposal"),)),
        Round(name="revise", segments=(revision,), sights=(own, addressed)),
        Round(name="verdict", segments=(verdict,), sights=(_all_solutions("revision"),)),
    ]
    if comparisons:
        both = Sight(segments=tuple(_STAGES), whose="all", show=_show_compared)
        comparison = Segment(name="comparison", instruction=_compare, read=_read_comparison, stream=None)
        rounds.append(Round(name="compare", segments=(comparison,), sights=(both,)))
    protocol = Protocol(
        reward="peer_review",
        name="critique_self_play",
        system_prompt=CRITIQUE_SYSTEM_PROMPT,
        rounds=tuple(rounds),
        personas=CRITIQUE_PERSONAS if personas is None else personas,
        on_failure=on_failure,
    )
    protocol.check()
    return protocol


def compared_items(view: View) -> dict[str, Item]:
    """Solutions by letter in an agent's comparison: both of every other agent, shuffled.

    Of two agents each compares its own, too: one vote about a revision would never rise above its noise. Agents with an
    even id see one order, those with an odd id the reverse of it.
    """
    items: list[Item] = [(stage, agent_id) for agent_id in sorted(view.aliases) for stage in _STAGES.values()]
    random.Random(view.seed).shuffle(items)
    if len(view.aliases) > 2:
        items = [item for item in items if item not in [(stage, view.agent_id) for stage in _STAGES.values()]]
    return dict(zip(ascii_uppercase, reversed(items) if view.agent_id % 2 else items, strict=False))


def _ranking_segment(name: str, votes_on_own: bool | None, *, stream: str | None) -> Segment:
    return Segment(
        name=name,
        instruction=partial(_rank, votes_on_own=votes_on_own),
        read=partial(_read_ranking, votes_on_own=votes_on_own),
        stream=stream,
    )


def _may_vote_on_own(view: View, votes_on_own: bool | None) -> bool:
    return len(view.aliases) == 2 if votes_on_own is None else votes_on_own


def _propose(view: View) -> str:
    return proposal_instruction(view.persona)


def _criticise(view: View) -> str:
    return critique_instruction(view.persona, view.own)


def _revise(view: View) -> str:
    return revision_instruction(view.persona)


def _rank(view: View, *, votes_on_own: bool | None) -> str:
    return ranking_instruction(view.persona, view.own, votes_on_own=_may_vote_on_own(view, votes_on_own))


def _compare(view: View) -> str:
    return ranking_instruction(view.persona, None, votes_on_own=False)


def _read_ranking(text: str, view: View, *, votes_on_own: bool | None) -> Reading:
    allowed = _may_vote_on_own(view, votes_on_own)
    return _read_votes(text, dict(view.letters), own=view.own, votes_on_own=allowed)


def _read_comparison(text: str, view: View) -> Reading:
    return _read_votes(text, compared_items(view))


def _read_votes(
    text: str, letters: dict[str, Item], *, own: str | None = None, votes_on_own: bool = False
) -> Reading:
    ballot = parse_ranking(text, letters, own=own, votes_on_own=votes_on_own)
    return Reading(
        response=RankingReply(preferences=ballot.votes, dropped=ballot.dropped),
        status=ranking_status(ballot),
        strategy="ranking",
    )


def _all_solutions(segment: str) -> Sight:
    return Sight(segments=(segment,), whose="all", show=_show_all)


def _solutions(turns: Sequence[Turn]) -> dict[Item, str]:
    """Solutions by stage and agent."""
    return {
        (_STAGES[turn.segment], turn.agent_id): turn.response.solution
        for turn in turns
        if isinstance(turn.response, Solution)
    }


def _show_all(turns: Sequence[Turn], view: View) -> str:
    texts = {turn.agent_id: turn.response.solution for turn in turns if isinstance(turn.response, Solution)}
    return "".join(
        shown_solution(letter, texts[agent_id])
        for letter, agent_id in view.letters.items()
        if agent_id in texts
    )


def _show_compared(turns: Sequence[Turn], view: View) -> str:
    texts = _solutions(turns)
    return "".join(
        shown_solution(letter, texts[item]) for letter, item in compared_items(view).items() if item in texts
    )


def _show_own(turns: Sequence[Turn], view: View) -> str:
    return "".join(
        shown("Your solution", turn.response.solution)
        for turn in turns
        if isinstance(turn.response, Solution)
    )


def _show_critiques(turns: Sequence[Turn], view: View) -> str:
    return "".join(
        shown("Critique of it", critique.text)
        for turn in turns
        if isinstance(turn.response, CritiqueReply)
        for critique in turn.response.critiques
        if critique.target == view.agent_id
    )


def critique_group(
    *,
    question: str,
    renderer: Renderer,
    rules: ReviewRules | None = None,
    judge: PolicySelfComparisonJudge | None = None,
    num_agents: int = 4,
    on_failure: Literal["void", "continue"] = "void",
    votes_on_own: bool | None = None,
    personas: dict[int, str] | None = None,
    **options: Any,
) -> MultiAgentConversationEnvGroupBuilder:
    """The builder of a critique conversation that peer review pays.

    Args:
        question: The problem.
        renderer: From `viva.conversation.rendering.load_renderer`.
        rules: By default those of the ``robust`` preset.
        judge: Compares revised with initial solutions, for a joint fit. Without one, the agents do so in a last round.
        num_agents: See `critique_protocol`.
        on_failure: See there.
        votes_on_own: See there.
        personas: See there.
        **options: Other fields of the builder.

    Raises:
        ValueError: If the conversation could not be held.
    """
    # a protocol alone is looked at without what plays it
    from viva.judging.judge import JudgeOptions
    from viva.rewards.critique import PeerReview
    from viva.rewards.review import ReviewRules
    from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder

    rules = ReviewRules() if rules is None else rules
    return MultiAgentConversationEnvGroupBuilder(
        question=question,
        renderer=renderer,
        protocol=critique_protocol(
            num_agents,
            personas=personas,
            on_failure=on_failure,
            votes_on_own=votes_on_own,
            comparisons=rules.fit == "joint" and judge is None,
        ),
        reward=PeerReview(rules=rules, compared_by=None if judge is None else JudgeOptions()),
        judge=judge,
        num_agents=num_agents,
        **options,
    )
