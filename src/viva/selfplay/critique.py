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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from string import ascii_uppercase
from typing import Literal

from viva.conversation.critiques import (
    CRITIQUE_PERSONAS,
    CRITIQUE_SYSTEM_PROMPT,
    PAIR_REQUEST,
    comparison_instruction,
    critique_instruction,
    label_vote,
    may_vote_on_own,
    proposal_instruction,
    ranking_instruction,
    read_critiques,
    read_revision,
    revision_instruction,
    shown,
)
from viva.conversation.protocol import Protocol, Reading, Round, Segment, Sight, View, shown_solution
from viva.conversation.records import CritiqueReply, Solution, Turn
from viva.judging.ballots import Item
from viva.judging.ranking import RankingReply, parse_ranking

BallotForm = Literal["written", "labels"]
"""Form of the votes: rankings that agents write, or label probabilities pair by pair."""

_SOLVER, _CRITIC = "solver", "critic"
"""Roles: proposals and revisions are the solver's, all else is the critic's."""

_STAGES = {"proposal": "initial", "revision": "revised"}
"""Segments that give a solution, and what it is called on a joint ballot."""


def critique_protocol(
    num_agents: int,
    *,
    personas: dict[int, str] | None = None,
    on_failure: Literal["void", "continue"] = "void",
    votes_on_own: bool | None = None,
    comparisons: bool = False,
    ballots: BallotForm = "written",
) -> Protocol:
    """The protocol for a number of agents: at least 2, at most as many as there are letters for what they rank.

    Personas are by default `CRITIQUE_PERSONAS`; for ``votes_on_own`` see `may_vote_on_own`. With ``comparisons``, a
    last round has every agent rank the first and the revised solutions of all others against one another, by votes
    about ``("initial", agent)`` and ``("revised", agent)``. With ``ballots="labels"``, agents vote on each pair by
    label probabilities (`viva.conversation.critiques`), of which no token is sampled, so that r_meta trains nothing.

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
    proposal = Segment(name="proposal", instruction=proposal_instruction, stream="r_sol", role=_SOLVER)
    ranking = _ranking_segment("ranking", votes_on_own, ballots, stream=None)
    critique = Segment(
        name="critique", instruction=critique_instruction, read=read_critiques, stream="r_diag", role=_CRITIC
    )
    revision = Segment(
        name="revision", instruction=revision_instruction, read=read_revision, stream="r_sol", role=_SOLVER
    )
    verdict = _ranking_segment("verdict", votes_on_own, ballots, stream="r_meta")
    own = Sight(segments=("proposal",), whose="own", show=_show_own)
    addressed = Sight(segments=("critique",), whose="addressed", show=_show_critiques)
    rounds = [
        Round(name="propose", segments=(proposal,)),
        Round(
            name="review",
            segments=(ranking, critique),
            sights=(Sight(segments=("proposal",), show=_show_all),),
        ),
        Round(name="revise", segments=(revision,), sights=(own, addressed)),
        Round(name="verdict", segments=(verdict,), sights=(Sight(segments=("revision",), show=_show_all),)),
    ]
    if comparisons:
        both = Sight(segments=tuple(_STAGES), show=_show_compared)
        rounds.append(Round(name="compare", segments=(_comparison_segment(ballots),), sights=(both,)))
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

    Of two agents each compares its own, too. Agents with an odd id see the reverse order of those with an even id.
    """
    items: list[Item] = [(stage, agent_id) for agent_id in sorted(view.aliases) for stage in _STAGES.values()]
    random.Random(view.seed).shuffle(items)
    if len(view.aliases) > 2:
        items = [item for item in items if item not in [(stage, view.agent_id) for stage in _STAGES.values()]]
    return dict(zip(ascii_uppercase, reversed(items) if view.agent_id % 2 else items, strict=False))


def _ranking_segment(
    name: str, votes_on_own: bool | None, ballots: BallotForm, *, stream: str | None
) -> Segment:
    if ballots == "labels":
        return replace(label_vote(name, votes_on_own=votes_on_own), role=_CRITIC)
    return Segment(
        name=name,
        instruction=partial(ranking_instruction, votes_on_own=votes_on_own),
        read=partial(_read_ranking, votes_on_own=votes_on_own),
        stream=stream,
        role=_CRITIC,
    )


def _comparison_segment(ballots: BallotForm) -> Segment:
    by_labels = ballots == "labels"
    return Segment(
        name="comparison",
        instruction=PAIR_REQUEST if by_labels else comparison_instruction,
        read=_read_comparison,
        votes_on=_compared_texts if by_labels else None,
        stream=None,
        role=_CRITIC,
    )


def _read_ranking(text: str, view: View, *, votes_on_own: bool | None) -> Reading:
    letters: dict[str, Item] = dict(view.letters)
    allowed = may_vote_on_own(view, votes_on_own)
    return _reading(parse_ranking(text, letters, own=view.own, votes_on_own=allowed))


def _read_comparison(text: str, view: View) -> Reading:
    return _reading(parse_ranking(text, compared_items(view)))


def _reading(reply: RankingReply) -> Reading:
    return Reading(response=reply, status=reply.status, strategy="ranking")


def _solutions(turns: Sequence[Turn]) -> Iterator[tuple[Turn, str]]:
    return ((turn, turn.response.solution) for turn in turns if isinstance(turn.response, Solution))


def _show_all(turns: Sequence[Turn], view: View) -> str:
    texts: dict[Item, str] = {turn.agent_id: solution for turn, solution in _solutions(turns)}
    return _show_lettered(view.letters, texts)


def _show_compared(turns: Sequence[Turn], view: View) -> str:
    return _show_lettered(compared_items(view), _texts_by_stage(turns))


def _texts_by_stage(turns: Sequence[Turn]) -> dict[Item, str]:
    return {(_STAGES[turn.segment], turn.agent_id): solution for turn, solution in _solutions(turns)}


def _compared_texts(turns: Sequence[Turn], view: View) -> dict[Item, str]:
    """Texts that the agent compares, without letters: each pair is shown in both orders."""
    items, texts = set(compared_items(view).values()), _texts_by_stage(turns)
    return {item: text for item, text in texts.items() if item in items}


def _show_lettered(items: Mapping[str, Item], texts: Mapping[Item, str]) -> str:
    return "".join(shown_solution(letter, texts[item]) for letter, item in items.items() if item in texts)


def _show_own(turns: Sequence[Turn], view: View) -> str:
    return "".join(shown("Your solution", solution) for _, solution in _solutions(turns))


def _show_critiques(turns: Sequence[Turn], view: View) -> str:
    return "".join(
        shown("Critique of it", critique.text)
        for turn in turns
        if isinstance(turn.response, CritiqueReply)
        for critique in turn.response.critiques
        if critique.target == view.agent_id
    )
