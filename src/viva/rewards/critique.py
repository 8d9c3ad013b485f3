"""The rewards of critique self-play (CoNL, arXiv 2601.21464) as one reward of a conversation.

Scores come from `viva.rewards.review`; each is credited to the sampled tokens that earned it:

    round 0  proposal   the whole reply                 r_sol of the initial solution
    round 1  ranking    masked                          -
    round 1  critique   each critique's own tokens      the gain of its target (or the reply, r_diag)
    round 2  revision   the whole reply                 r_sol
    round 3  verdict    the whole reply                 r_meta; nothing if no vote could be compared

What cannot be located on the sampled ids earns nothing.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tinker_cookbook.renderers.base import Renderer

from viva.conversation.coordinator import gather_or_cancel
from viva.conversation.protocol import Protocol
from viva.conversation.records import Conversation, CritiqueReply, Turn
from viva.judging.ballots import Ballots, Item
from viva.judging.comparison import Comparison, TournamentPattern, same_words
from viva.judging.judge import JudgeOptions, PolicySelfComparisonJudge
from viva.judging.ranking import RankingReply
from viva.rewards.base import Played, Reward, Scored, by_agent, graded, turns_of_seats
from viva.rewards.review import (
    ReviewRules,
    ReviewScores,
    ReviewVotes,
    duel_of,
    initial,
    review_rules,
    revised,
    score_review,
)
from viva.rewards.review_metrics import review_metrics
from viva.rewards.spans import token_ranges
from viva.rewards.streams import GroupCredit, SpanCredit

Judged = dict[int, list[Comparison]]
"""By agent: its initial solution (item 0) against its revised one (item 1), in both orders."""

_SEGMENTS = ("proposal", "ranking", "critique", "revision", "verdict")


@dataclass(frozen=True, kw_only=True)
class PeerReview(Reward):
    """r_sol, r_meta and r_diag of a conversation that has the segments of `viva.selfplay.critique`."""

    rules: ReviewRules = field(default_factory=ReviewRules)
    compared_by: JudgeOptions | None = field(default_factory=JudgeOptions)
    """The judge that compares revised with initial solutions in a joint fit; ``None``: the agents do so in a last
    round."""
    name: str = "peer_review"

    @property
    def judge(self) -> JudgeOptions | None:
        """The judge of a joint fit."""
        return self.compared_by if self.rules.fit == "joint" else None

    def check(self, protocol: Protocol, num_agents: int) -> None:
        """Refuse a protocol without the segments that are scored.

        Raises:
            ValueError: With those that are missing.
        """
        asked = {segment.name for round_ in protocol.rounds for segment in round_.segments}
        needed = {*_SEGMENTS, "comparison"} if self._agents_compare else {*_SEGMENTS}
        if missing := sorted(needed - asked):
            raise ValueError(
                f"the reward {self.name!r} scores proposals, critiques and votes; protocol {protocol.name!r} does not "
                f"ask for {', '.join(missing)}. Use viva.selfplay.critique, or another reward."
            )

    @property
    def _agents_compare(self) -> bool:
        return self.rules.fit == "joint" and self.compared_by is None

    def new_record(self, protocol: Protocol, judge: PolicySelfComparisonJudge | None) -> dict[str, Any]:
        """The judge and the rules, and what is not known yet."""
        return {
            "judge": None if judge is None else judge.described(),
            "rules": asdict(self.rules),
            "scores": {},
            "streams": {},
            "correct_initial": None,
        }

    async def score(self, played: Played) -> Scored:
        """Fit scores to the ballots and pay for solutions, agreement and useful critique.

        Returns:
            Weighted rewards: the first lane of an agent has r_sol, r_meta and the metrics, the second r_diag. The
            credit is what trains.

        Raises:
            BradleyTerryError: If a fit does not converge.
            ValueError: If the trajectories are not those of the conversation.
        """
        conversation = played.conversation
        judged = await self._judged(played)
        played.record["comparisons"] = [
            {"agent_id": agent_id, **asdict(comparison)}
            for agent_id, comparisons in judged.items()
            for comparison in comparisons
        ]
        votes = review_votes(conversation, judged)
        scores = score_review(votes, self.rules)
        spans = tuple(_spans(played, scores, self.rules))
        correct = graded(conversation.solutions("revision"), played.answer, played.grader)
        correct_initial = graded(conversation.solutions("proposal"), played.answer, played.grader)
        played.record.update(
            _scores_record(scores, votes.agents),
            correct=by_agent(correct),
            correct_initial=by_agent(correct_initial),
        )
        metrics_A = review_metrics(
            conversation, scores, votes, judged, correct_initial=correct_initial, correct=correct
        )
        rewards: dict[tuple[int, int], float] = {}
        for agent_id, total in scores.totals.items():
            diag = self.rules.weights["r_diag"] * scores.r_diag[agent_id]
            rewards |= {(agent_id, 0): total - diag, (agent_id, 1): diag}
        return Scored(
            rewards=rewards,
            metrics=metrics_A,
            credit=GroupCredit(spans=spans, weights=self.rules.weights),
        )

    async def _judged(self, played: Played) -> Judged:
        """The judge's comparisons of every agent's two solutions, where they differ, all in flight together."""
        judge, conversation = played.judge, played.conversation
        if self.rules.fit != "joint" or judge is None:
            return {}
        before, after = conversation.solutions("proposal"), conversation.final_solutions
        changed = [agent_id for agent_id in after if not same_words(before[agent_id], after[agent_id])]
        tournaments = await gather_or_cancel(
            judge.tournament(
                conversation.question,
                {0: before[agent_id], 1: after[agent_id]},
                TournamentPattern.ALL_PAIRS_BOTH_WAYS,
                random.Random(f"{played.seed}/judge/{agent_id}").getrandbits(31),
            )
            for agent_id in changed
        )
        return dict(zip(changed, tournaments, strict=True))


def peer_review(
    *,
    preset: str = "robust",
    weights: Mapping[str, float] | None = None,
    judge: JudgeOptions | None = None,
    **rules: Any,
) -> PeerReview:
    """The rewards of critique self-play: r_sol for solutions, r_meta for agreement, r_diag for useful critique.

    Args:
        preset: ``robust`` or ``paper``.
        weights: Weights of the streams that differ from the preset's.
        judge: Of the comparisons of revised with initial solutions; by default the policy being trained.
        **rules: Other fields of `viva.rewards.review.ReviewRules`.

    Raises:
        ValueError: If a value is none of those allowed.
    """
    chosen = review_rules(preset)
    chosen = replace(chosen, weights={**chosen.weights, **(weights or {})}, **rules)
    return PeerReview(rules=chosen, compared_by=judge or JudgeOptions())


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


def _spans(played: Played, scores: ReviewScores, rules: ReviewRules) -> Iterator[SpanCredit]:
    """Spans and rewards of one conversation, in order of seat and turn."""
    for seat, index, turn in turns_of_seats(played):
        stream = played.protocol.rounds[turn.round_index].segments[turn.lane].stream
        if stream is None or turn.agent_id not in scores.totals:
            continue
        tokens_T = played.trajectories_G[seat].transitions[index].ac.tokens
        for start, stop, reward in _earned(turn, scores, rules, tokens_T, played.renderer):
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
