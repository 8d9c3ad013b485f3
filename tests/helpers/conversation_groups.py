"""Builders of both systems' conversations, from options of their protocols, of their rewards and of the builder."""

from collections.abc import Mapping
from typing import Any

from viva.judging.comparison import Judge, TournamentPattern
from viva.judging.judge import JudgeOptions
from viva.rewards import tournament
from viva.rewards.critique import PeerReview
from viva.rewards.review import ReviewRules
from viva.selfplay.critique import critique_protocol
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.selfplay.round_robin import round_robin_protocol


def _named(options: dict[str, Any], *names: str) -> Mapping[str, Any]:
    """Options of some names, taken out of the others."""
    return {name: options.pop(name) for name in names if name in options}


def round_robin_group(
    *,
    max_rounds: int = 5,
    tournament_pattern: TournamentPattern = TournamentPattern.ALL_PAIRS_BOTH_WAYS,
    **options: Any,
) -> MultiAgentConversationEnvGroupBuilder:
    """A conversation in turns that a tournament pays."""
    protocol = round_robin_protocol(max_rounds, **_named(options, "order", "on_failure", "personas"))
    reward = tournament(pattern=tournament_pattern)
    return MultiAgentConversationEnvGroupBuilder(protocol=protocol, reward=reward, **options)


def critique_group(
    *, rules: ReviewRules | None = None, judge: Judge | None = None, num_agents: int = 4, **options: Any
) -> MultiAgentConversationEnvGroupBuilder:
    """A critique conversation that peer review pays; without a judge, the agents compare in a last round."""
    reward = PeerReview(rules=rules or ReviewRules(), compared_by=None if judge is None else JudgeOptions())
    protocol = critique_protocol(
        num_agents,
        comparisons=reward.agents_compare,
        **_named(options, "personas", "on_failure", "votes_on_own", "ballots"),
    )
    return MultiAgentConversationEnvGroupBuilder(
        protocol=protocol, reward=reward, judge=judge, num_agents=num_agents, **options
    )
