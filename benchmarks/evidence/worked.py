"""A conversation paid by what its critics work out: propose and criticise; no revision, and no vote.

A critique says of each solution whether it is right and gives the correct number (`CRITIQUE_TEXTS`). A proposal earns
the share of the other agents whose critiques mostly give its number. `PEERS` is the control without an exchange: in
the second round agents answer the bare problem once more, and a proposal earns the share of the others whose answer
this is. `ALONE` has no second round: a proposal earns the share of the others' proposals that give its number.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import yaml

import viva
from viva.conversation.records import CritiqueReply
from viva.judging.answers import answer_key
from viva.selfplay.critique import critique_protocol

CRITIQUE_TEXTS = Path(__file__).parents[2] / "examples" / "smollm2_critique.yaml"
NUM_AGENTS = 4


def worked_out(conversation: viva.Conversation) -> dict[int, str]:
    """The number that each critic gives most often; critics that give none are left out."""
    found: dict[int, str] = {}
    for turn in conversation.turns:
        if isinstance(turn.response, CritiqueReply):
            given = [key for each in turn.response.critiques if (key := answer_key(each.text)) is not None]
            numbers = [key for key in given if any(map(str.isdigit, key))]
            if numbers:
                found[turn.agent_id] = Counter(numbers).most_common(1)[0][0]
    return found


def shares(solutions: Mapping[int, str], answers: Mapping[int, str]) -> dict[int, float]:
    """By agent, the share of the others' answers that its solution gives; 0 where nobody else has one."""
    earned = {}
    for agent, solution in solutions.items():
        others = [answer == answer_key(solution) for other, answer in answers.items() if other != agent]
        earned[agent] = fmean(others) if others else 0.0
    return earned


def by_critics(conversation: viva.Conversation) -> dict[int, float]:
    """The pay of proposals by the critics' numbers."""
    return shares(conversation.solutions("proposal"), worked_out(conversation))


def _protocol() -> viva.Protocol:
    texts = yaml.safe_load(CRITIQUE_TEXTS.read_text(encoding="utf-8"))["prompts"]
    whole = critique_protocol(NUM_AGENTS, ballots="labels", on_failure="continue").with_prompts(texts)
    propose, review, *_ = whole.rounds
    (critique,) = [replace(each, stream=None) for each in review.segments if each.name == "critique"]
    criticise = viva.Round("criticise", [critique], review.sights)
    return replace(whole, name="worked", rounds=(propose, criticise), reward=by_critics)


def by_answers(conversation: viva.Conversation) -> dict[int, float]:
    """The pay of proposals by the answers of the second round."""
    return shares(conversation.solutions("proposal"), _keys(conversation, "answer"))


def by_proposals(conversation: viva.Conversation) -> dict[int, float]:
    """The pay of proposals by one another."""
    return shares(conversation.solutions("proposal"), _keys(conversation, "proposal"))


def _keys(conversation: viva.Conversation, segment: str) -> dict[int, str]:
    keys = {agent: answer_key(text) for agent, text in conversation.solutions(segment).items()}
    return {agent: key for agent, key in keys.items() if key is not None}


def _without_exchange(protocol: viva.Protocol) -> viva.Protocol:
    propose, criticise = protocol.rounds
    (proposal,), (critique,) = propose.segments, criticise.segments
    answer = replace(proposal, name="answer", role=critique.role, stream=None)
    return replace(
        protocol, name="peers", rounds=(propose, viva.Round("answer", [answer])), reward=by_answers
    )


WORKED = _protocol()
PEERS = _without_exchange(WORKED)
ALONE = replace(PEERS, name="alone", rounds=PEERS.rounds[:1], reward=by_proposals)
