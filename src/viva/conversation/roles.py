"""The policies of one conversation: which of them speaks at each turn, which are trained, and which only take part.

A turn belongs to an agent (``agent_0``, ``agent_1``, ...) and to a role, which its segment names: in critique
self-play ``solver`` (proposals, revisions) and ``critic`` (rankings, critiques, verdicts). Policies are declared for
agents or for roles; ``others`` stands for all that are not named::

    "shared"                                     one policy speaks at every turn
    "per_agent", "per_role"                      one trained policy for each
    {"agent_0": "trained", "others": "initial"}  by name, with the weights that each has
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from viva.conversation.messages import did_you_mean
from viva.conversation.protocol import Protocol, Segment

Policies: TypeAlias = str | Mapping[str, str]
"""Declared policies: a word, or weights by the name of an agent or role."""

TRAINED, OTHERS = "trained", "others"
_WORDS = ("shared", "per_agent", "per_role")
_NAME = re.compile(r"[A-Za-z0-9_-]+")


def role_of(segment: Segment) -> str:
    """The role whose turn a segment is."""
    return segment.role or segment.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The members of a conversation with several policies."""

    members: Mapping[tuple[int, str], str]
    """Name of the policy that speaks, by agent and segment."""
    weights: Mapping[str, str]
    """By name, in order of the first turn: `TRAINED`, or what a member that is not trained has."""

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the policies that are trained; the first is the run's main one."""
        return tuple(name for name, weights in self.weights.items() if weights == TRAINED)

    @property
    def frozen(self) -> dict[str, str]:
        """Weights of the policies that take part and are not trained, by name."""
        return {name: weights for name, weights in self.weights.items() if weights != TRAINED}

    def speaker(self, agent_id: int, segment: str) -> "Speaker":
        """The policy whose turn it is."""
        name = self.members[agent_id, segment]
        return Speaker(name=name, is_trained=name in self.trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """The policy of a turn."""

    name: str
    is_trained: bool


def assign(policies: Policies, protocol: Protocol, num_agents: int) -> Roles:
    """The policies that are declared for a conversation that has more than one.

    Raises:
        ValueError: If an agent or role is unknown, has no policy, or none of the policies is trained.
    """
    agents = [f"agent_{agent_id}" for agent_id in range(num_agents)]
    roles = list(dict.fromkeys(role_of(segment) for round_ in protocol.rounds for segment in round_.segments))
    if isinstance(policies, str):
        if policies not in _WORDS:
            raise ValueError(
                f"policies must be {', '.join(_WORDS)} or pairs like "
                f'{{"agent_0": "trained", "others": "initial"}}; got {policies!r}.{did_you_mean(policies, _WORDS)}'
            )
        if policies == "shared":
            raise ValueError("policies=shared is one policy, which needs no assignment")
        names = agents if policies == "per_agent" else roles
        if len(names) < 2:
            raise ValueError(
                f"policies={policies} needs two roles or more, and protocol {protocol.name!r} has one, {names[0]!r}; "
                "use policies=per_agent, or give its segments a role"
            )
        policies = dict.fromkeys(names, TRAINED)
    if protocol.votes_by_labels:
        raise ValueError(
            f"protocol {protocol.name!r} has votes by label probabilities, which one policy gives for all; use written "
            "votes (ballots=written), or policies=shared"
        )
    names = _names(policies, agents, roles)
    weights = {name: policies[name] for name in (*names, OTHERS) if name in policies}
    _check_weights(weights)
    by_role = names is roles
    return Roles(
        members={
            (agent_id, segment.name): name if name in policies else OTHERS
            for agent_id, agent in enumerate(agents)
            for round_ in protocol.rounds
            for segment in round_.segments
            for name in [role_of(segment) if by_role else agent]
        },
        weights=weights,
    )


def _names(policies: Mapping[str, str], agents: Sequence[str], roles: Sequence[str]) -> Sequence[str]:
    """The agents or the roles, whichever policies are declared for."""
    named = [name for name in policies if name != OTHERS]
    for name in named:
        if name not in agents and name not in roles:
            known = (*agents, *roles, OTHERS)
            raise ValueError(
                f"policies names {name!r}, which is no agent and no role of the conversation; allowed: "
                f"{', '.join(known)}.{did_you_mean(name, known)}"
            )
    names = agents if named and named[0] in agents else roles
    if strange := [name for name in named if name not in names]:
        raise ValueError(
            f"policies names agents and roles, {named[0]!r} and {strange[0]!r}, and a turn belongs to one of each; "
            "name agents alone, or roles alone"
        )
    missing = [name for name in names if name not in policies]
    if missing and OTHERS not in policies:
        raise ValueError(
            f"policies names nobody who speaks for {', '.join(missing)}; add them, or others for all that are not named"
        )
    if not named or (OTHERS in policies and not missing):
        told = "names all of them already" if named else "names nobody beside them"
        raise ValueError(f"policies has others, and {told}; leave others out, or use policies=shared")
    if len(names) == 1:
        raise ValueError(
            f"policies names the role {names[0]!r}, and the conversation has no other; name agents, like agent_0"
        )
    return names


def _check_weights(weights: Mapping[str, str]) -> None:
    if TRAINED not in weights.values():
        raise ValueError(
            f"policies trains nobody: {dict(weights)}; give one of them the weights {TRAINED!r}, or look at them with "
            "viva eval"
        )
    if unfit := [name for name in weights if not _NAME.fullmatch(name)]:
        raise ValueError(
            f"the role {unfit[0]!r} would be the name of a folder and of metrics; give its segment a role of letters, "
            "digits, _ and -"
        )
