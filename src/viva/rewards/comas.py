"""The reward ``comas``: solver against evaluator, whom a scorer decides between (CoMAS, arXiv 2510.08529).

In co-evolving multi-agent systems (Xue et al., 2025) one agent solves, one says what is wrong with the solution, and
one reads both and gives a score ``tau`` from 1 (an error that was named is fatal) to 3 (none holds). With s = (tau -
1) / 2,

    r_solver = s        r_evaluator = 1 - s        r_scorer = 0;  -1, and 0 for the other two, if it cannot be read

Here it is played on critique self-play, where nobody gives a number: s is the Bradley-Terry score of the *proposal* in
the joint fit of ``peer_review`` (`viva.rewards.review`), which falls where a revision beats it, so a critique that
found an error is paid. With V in [0, 1] the scores, i a solver and k a critic of it,

    proposal of i           V_i^init
    critique of i by k      1 - V_i^init        on that critique's own tokens
    revision of i           V_i^final           the solution of the second round, which nobody evaluates any more
    verdict of i            0;  -1 if no vote in it can be read

Unlike the paper, s is everybody's opinion and not one scorer's, all critics of a proposal are paid alike, and a verdict
is a ranking. Two separate fits would not let critique change s, so the fit must be joint.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from viva.conversation.protocol import Protocol
from viva.judging.judge import JudgeOptions
from viva.judging.records import ConversationRecord
from viva.rewards.base import NO_MODELS, Match, Models, Played, Reward, Scored, paid
from viva.rewards.critique import (
    SEGMENTS,
    PeerReview,
    check_segments,
    review_credit,
    review_votes,
    revision_judge_figures,
    stored_votes,
)
from viva.rewards.review import ReviewVotes, score_review


@dataclass(frozen=True, kw_only=True)
class ComasEarned:
    """Rewards of one conversation, by agent."""

    proposal: Mapping[int, float]
    """s; a critique of the agent earns 1 - s."""
    critique: Mapping[int, Mapping[int, float]]
    """By critic and target."""
    revision: Mapping[int, float]
    verdict: Mapping[int, float]

    def total(self, agent_id: int) -> float:
        """All that an agent earns; of several critiques the mean."""
        critiques = self.critique.get(agent_id, {})
        parts = [self.proposal[agent_id], self.revision[agent_id], self.verdict.get(agent_id, 0.0)]
        return math.fsum([*parts, math.fsum(critiques.values()) / max(len(critiques), 1)])


@dataclass(frozen=True, kw_only=True)
class Comas(Reward):
    """Proposals against the critiques of them, by a joint fit of votes and comparisons."""

    review: PeerReview = field(default_factory=PeerReview)
    """Makes the comparisons and the fit, which must be joint."""
    name: str = "comas"

    def __post_init__(self) -> None:
        if self.review.rules.fit != "joint":
            raise ValueError(
                f"the reward {self.name!r} needs fit='joint', or no critique could change what a proposal is worth; "
                f"got {self.review.rules.fit!r}"
            )

    @property
    def judge(self) -> JudgeOptions | None:
        """The judge that compares revised with first solutions."""
        return self.review.judge

    def judged_by(self, judge: JudgeOptions) -> "Comas":
        """The same reward with another judge."""
        return replace(self, review=self.review.judged_by(judge))

    def matches(self, protocol: Protocol, num_agents: int) -> list[Match]:
        """The pairs that peer review compares."""
        return self.review.matches(protocol, num_agents)

    @property
    def agents_compare(self) -> bool:
        """As in peer review."""
        return self.review.agents_compare

    def check(self, protocol: Protocol, num_agents: int) -> None:
        """Refuse a protocol without solver, evaluator and scorer."""
        needed = (*SEGMENTS, "comparison") if self.agents_compare else SEGMENTS
        check_segments(self.name, protocol, needed, "scores proposals, critiques and votes")

    async def score(self, played: Played) -> Scored:
        """Fit scores, and share each proposal's 1 between its author and its critics."""
        judged = await self.review.judged(played)
        earned = self.earned(review_votes(played.conversation, judged))
        weights = dict.fromkeys(played.protocol.streams, 1.0)
        replies = {"proposal": earned.proposal, "revision": earned.revision, "verdict": earned.verdict}
        credit = review_credit(played, replies, earned.critique, weights)
        rewards = {(agent_id, 0): earned.total(agent_id) for agent_id in played.agents}
        figures = revision_judge_figures(judged, *played.correctness)
        return paid(played, Scored(rewards=rewards, credit=credit), figures)

    async def stored_pay(
        self, record: ConversationRecord, seed: int, models: Models = NO_MODELS
    ) -> dict[int, float]:
        """The sums of all that agents earn."""
        check_segments(self.name, record, SEGMENTS)
        earned = self.earned(await stored_votes(record, self.review.rules, seed, models.judge))
        return {agent_id: earned.total(agent_id) for agent_id in sorted(earned.revision)}

    def earned(self, votes: ReviewVotes) -> ComasEarned:
        """Earnings of all replies."""
        scores = score_review(votes, self.review.rules)
        worth = {agent_id: score.value for agent_id, score in scores.initial.items()}
        return ComasEarned(
            proposal=worth,
            critique={
                critic: {target: 1.0 - worth[target] for target in own}
                for critic, own in scores.r_diag_by_target.items()
            },
            revision=scores.r_sol,
            verdict={
                voter: 0.0 if votes_cast else -1.0
                for voter, votes_cast in votes.final.items()
                if voter in worth
            },
        )


def comas(*, judge: JudgeOptions | None = None) -> Comas:
    """CoMAS on critique self-play: solver and evaluator share each proposal's 1, a verdict is paid for its form.

    Args:
        judge: Of the comparisons of revised with first solutions; by default the policy being trained.
    """
    return Comas(review=PeerReview(compared_by=judge or JudgeOptions()))
