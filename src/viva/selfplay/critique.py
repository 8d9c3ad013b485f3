"""Critique self-play: propose, rank blindly and criticise, revise or defend, final verdict (CoNL, arXiv 2601.21464).

A group is one conversation of `viva.selfplay.critique_protocol`: one environment for every agent and lane. Its scores
and rewards come from `viva.rewards.review`; each reward is credited to the tokens of the segment that earned it.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, Trajectory

from viva.conversation.coordinator import MultiAgentCoordinator
from viva.conversation.env import MultiAgentConversationEnv
from viva.conversation.protocol import Protocol
from viva.conversation.records import Conversation, CritiqueReply
from viva.conversation.together import together
from viva.judging.ballots import Ballots, Item
from viva.judging.comparison import Comparison, same_words
from viva.judging.judge import PolicySelfComparisonJudge
from viva.judging.ranking import RankingReply
from viva.judging.tournament import TournamentPattern
from viva.rewards.review import ReviewScores, ReviewVotes, duel_of, initial, revised, score_review
from viva.rewards.review_rules import ReviewRules
from viva.rewards.streams import GroupCredit
from viva.selfplay.critique_credit import review_spans
from viva.selfplay.critique_metrics import review_metrics
from viva.selfplay.critique_protocol import critique_protocol
from viva.selfplay.group import Grader, by_agent, check_finished, coordinator_of, graded, transcript

__all__ = ["CritiqueSelfPlayEnvGroupBuilder", "review_votes"]

Judged = dict[int, list[Comparison]]
"""By agent: its initial solution (item 0) against its revised one (item 1), in both orders."""


@dataclass(kw_only=True)
class CritiqueSelfPlayEnvGroupBuilder(EnvGroupBuilder):
    """Builds the environments of one conversation and computes its rewards and their credit.

    Raises:
        ValueError: If the conversation could not be held, see `critique_protocol`; if a joint fit has no judge and
            no agents to compare revised with initial solutions.
    """

    question: str
    renderer: Renderer
    """From `viva.conversation.rendering.load_renderer`."""
    rules: ReviewRules = field(default_factory=ReviewRules)
    judge: PolicySelfComparisonJudge | None = None
    """Compares revised with initial solutions, for a joint fit. Without one, the agents do so in a last round."""
    answer: str | None = None
    """The known answer, if there is one. It never enters a reward; with a grader, metrics tell who is right."""
    grader: Grader | None = None
    num_agents: int = 4
    on_failure: Literal["void", "continue"] = "void"
    """``void``: one agent's failure ends and voids the conversation. ``continue``: the others go on, and those that
    finish are scored; void if fewer than two do."""
    votes_on_own: bool | None = None
    """Whether agents rank their own solution, too; ``None``: only between two agents."""
    personas: dict[int, str] | None = None
    seed: int = 0
    """Of letters and judge."""
    tags: tuple[str, ...] = ("critique_self_play",)
    _record: dict[str, Any] | None = field(default=None, init=False, repr=False)
    _credit: GroupCredit | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Reject a conversation that could not be held."""
        self.protocol: Protocol = critique_protocol(
            self.num_agents,
            personas=self.personas,
            on_failure=self.on_failure,
            votes_on_own=self.votes_on_own,
            comparisons=self.rules.fit == "joint" and self.judge is None,
        )

    async def make_envs(self) -> Sequence[Env]:
        """One fresh conversation: an environment for every agent and lane, agent by agent."""
        self._record, self._credit = None, None
        coordinator = MultiAgentCoordinator(self.question, self.num_agents, self.protocol, seed=self.seed)
        return [
            MultiAgentConversationEnv(agent_id, coordinator, self.renderer, lane)
            for agent_id, lane in self.protocol.seats(self.num_agents)
        ]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Fit scores to the ballots and pay for solutions, agreement and useful critique.

        Args:
            trajectory_group: The sampled tokens, in the order of the environments.
            env_group: The environments of one `make_envs`.

        Returns:
            Weighted rewards and metrics, in the order of the environments: the first lane of an agent has r_sol,
            r_meta and the metrics, the second r_diag. What trains is `credit`. An agent that failed (``continue``) gets
            0.0 and no metrics: a place holder, its trajectory must not be trained.

        Raises:
            ConversationVoidError: If agents failed or did not finish, and the failure rule says so.
            BradleyTerryError: If a fit does not converge.
            ValueError: If the environments are not those of one conversation.
        """
        coordinator, seats = coordinator_of(env_group)
        conversation = coordinator.conversation
        self._record = self._new_record(conversation)
        check_finished(coordinator)
        judged = await self._judged(conversation)
        self._record["comparisons"] = [
            {"agent_id": agent_id, **asdict(comparison)}
            for agent_id, comparisons in judged.items()
            for comparison in comparisons
        ]
        votes = review_votes(conversation, judged)
        scores = score_review(votes, self.rules)
        self._credit = GroupCredit(
            spans=tuple(
                review_spans(conversation, self.protocol, scores, self.rules, trajectory_group, self.renderer)
            ),
            weights=self.rules.weights,
        )
        correct = graded(conversation.solutions("revision"), self.answer, self.grader)
        correct_initial = graded(conversation.solutions("proposal"), self.answer, self.grader)
        self._record |= _scores_record(scores, votes.agents) | {
            "correct": by_agent(correct),
            "correct_initial": by_agent(correct_initial),
        }
        metrics_A = review_metrics(
            conversation, scores, votes, judged, correct_initial=correct_initial, correct=correct
        )
        return [self._seat_reward(env.agent_id, env.lane, scores, metrics_A) for env in seats]

    def credit(self) -> GroupCredit | None:
        """What the tokens of the last conversation earned; ``None`` before its rewards were computed."""
        return self._credit

    def record(self) -> dict[str, Any] | None:
        """What the transcript keeps of the last conversation whose rewards were asked for, ready for JSON.

        Beside the turns: rules, comparisons, scores (initial, final and their standard errors), streams (r_sol, r_meta,
        r_diag and total by agent), correct_initial and correct. Of a void conversation, what there was of them.
        """
        return self._record

    def logging_tags(self) -> list[str]:
        """Tags for the metrics of this kind of group."""
        return list(self.tags)

    def _new_record(self, conversation: Conversation) -> dict[str, Any]:
        return transcript(
            conversation, "critique_self_play", self.answer, system_prompt=self.protocol.system_prompt
        ) | {
            "judge": None if self.judge is None else self.judge.described(),
            "rules": asdict(self.rules),
            "scores": {},
            "streams": {},
            "correct_initial": None,
        }

    async def _judged(self, conversation: Conversation) -> Judged:
        """The judge's comparisons of every agent's two solutions, where they differ, all in flight together."""
        if self.rules.fit != "joint" or self.judge is None:
            return {}
        before, after = conversation.solutions("proposal"), conversation.final_solutions
        changed = [agent_id for agent_id in after if not same_words(before[agent_id], after[agent_id])]
        tournaments = await together(
            self.judge.tournament(
                self.question,
                {0: before[agent_id], 1: after[agent_id]},
                TournamentPattern.ALL_PAIRS_BOTH_WAYS,
                random.Random(f"{self.seed}/judge/{agent_id}").getrandbits(31),
            )
            for agent_id in changed
        )
        return dict(zip(changed, tournaments, strict=True))

    def _seat_reward(
        self, agent_id: int, lane: int, scores: ReviewScores, metrics_A: dict[int, Metrics]
    ) -> tuple[float, Metrics]:
        if agent_id not in scores.totals:
            return 0.0, {}
        diag = self.rules.weights["r_diag"] * scores.r_diag[agent_id]
        return (diag, {}) if lane else (scores.totals[agent_id] - diag, metrics_A[agent_id])


def review_votes(conversation: Conversation, judged: Judged) -> ReviewVotes:
    """The votes of one conversation: ballots of both rounds, who criticised whom, and revised against initial.

    Agents that failed are not scored; what they said before still counts. Each of the judge's two answers about an
    agent is one vote, however many agents there are: see `viva.rewards.review.duel_of`.
    """
    failed = {failure.agent_id for failure in conversation.failures}
    before, after = conversation.solutions("proposal"), conversation.solutions("revision")
    agents = tuple(agent_id for agent_id in sorted(after) if agent_id not in failed)
    sides = (initial, revised)
    duels = [
        duel_of(comparison, sides[comparison.first](agent_id), sides[comparison.second](agent_id))
        for agent_id, comparisons in judged.items()
        for comparison in comparisons
    ]
    texts: dict[Item, str] = {initial(agent_id): before[agent_id] for agent_id in agents}
    return ReviewVotes(
        agents=agents,
        initial=_ballots(conversation, "ranking"),
        final=_ballots(conversation, "verdict"),
        targets={
            turn.agent_id: [critique.target for critique in turn.response.critiques]
            for turn in conversation.turns
            if isinstance(turn.response, CritiqueReply)
        },
        across=_ballots(conversation, "comparison"),
        duels=tuple(duel for duel in duels if duel is not None),
        texts=texts | {revised(agent_id): after[agent_id] for agent_id in agents},
    )


def _ballots(conversation: Conversation, segment: str) -> Ballots:
    return {
        turn.agent_id: turn.response.preferences
        for turn in conversation.turns
        if turn.segment == segment and isinstance(turn.response, RankingReply)
    }


def _scores_record(scores: ReviewScores, agents: Sequence[int]) -> dict[str, Any]:
    return {
        "scores": {
            "initial": by_agent({agent_id: scores.initial[agent_id].value for agent_id in agents}),
            "final": by_agent({agent_id: scores.final[agent_id].value for agent_id in agents}),
            "initial_error": by_agent(
                {agent_id: scores.initial[agent_id].standard_error for agent_id in agents}
            ),
            "final_error": by_agent({agent_id: scores.final[agent_id].standard_error for agent_id in agents}),
        },
        "streams": by_agent(
            {
                agent_id: {
                    "r_sol": scores.r_sol[agent_id],
                    "r_meta": scores.r_meta[agent_id],
                    "r_diag": scores.r_diag[agent_id],
                    "total": scores.totals[agent_id],
                }
                for agent_id in agents
            }
        ),
        "rewards": by_agent(dict(scores.totals)),
    }
