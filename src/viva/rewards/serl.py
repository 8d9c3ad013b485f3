"""The rewards ``serl`` and ``serl_votes``: Copeland scores of pairwise judgements (SERL, arXiv 2511.07922).

In self-examining reinforcement learning (Ou et al., 2025) the policy answers a prompt G times, compares all pairs of
its answers in both orders, and is paid twice. With J the judgements, ``w(j)`` and ``l(j)`` winner and loser of one,
``J_i`` those about answer i, and ``len`` the length of an answer,

    actor:  R_i = 1/|J_i| sum_{j in J_i, w(j) = i} c(i, l(j))
            c(i, k) = len_k / len_i  if  0.8 len_k < len_i < 1.2 len_k,  else 0         (length control; or c = 1)
    judge:  r_j = sign(R_w(j) - R_l(j));  -1 if the judgement cannot be read, 0 if it is a tie

so a judgement is paid for agreeing with all judgements together. Ties are ours, half a win for both: two answers in the
same words tie, and if that earned nothing, an answer would be paid for being rare.

``serl`` pays the actor: plain samples as in the paper, or the final solutions of a conversation. The run's judge is not
trained, so its consistency is a metric, ``serl/judge_consistency``. ``serl_votes`` pays both: in critique self-play the
agents are the judges. A proposal earns R of the blind rankings, a revision R of the verdicts, a verdict the mean r_j of
its votes (-1 without a readable vote), critique nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tinker_cookbook.rl.types import Metrics

from viva.conversation.protocol import Protocol
from viva.conversation.records import Conversation, Turn
from viva.judging.ballots import Preference, Tie, Vote, pooled, sides_among
from viva.judging.comparison import (
    Comparison,
    Outcome,
    TournamentPattern,
    judge_accuracy,
    judge_health,
    matchup_count,
    pairs,
)
from viva.judging.judge import JudgeOptions
from viva.judging.records import ConversationRecord, ballots_by_segment
from viva.rewards.base import (
    JUDGE_REMEDY,
    NO_MODELS,
    JudgedReward,
    Match,
    Models,
    Played,
    Reward,
    Scored,
    paid,
    reply_credit,
)
from viva.rewards.critique import check_segments
from viva.rewards.solutions import SolutionReward, Solutions

LENGTH_BAND = 0.2
"""Share by which the lengths of two answers may differ, as in the paper."""


def judgement_of(comparison: Comparison) -> Vote | None:
    """A judge's comparison as a vote; ``None`` if its reply could not be read."""
    match comparison.outcome:
        case Outcome.A:
            return Preference(comparison.first, comparison.second)
        case Outcome.B:
            return Preference(comparison.second, comparison.first)
        case Outcome.TIE:
            return Tie(comparison.first, comparison.second)
        case Outcome.INVALID:
            return None


def copeland(
    judgements: Sequence[Vote | None], texts: Mapping[int, str], band: float | None = LENGTH_BAND
) -> dict[int, float]:
    """Copeland scores R by id, in [0, 1 / (1 - band)]; an answer without a readable judgement has none.

    Args:
        judgements: All of them; ``None`` for one that could not be read. A divided vote counts whole.
        texts: The answers by id; judgements about others are left out.
        band: See `LENGTH_BAND`; ``None``: every win counts 1.
    """
    points: dict[int, list[float]] = {each: [] for each in texts}
    for vote in judgements:
        if vote is None or (pair := sides_among(vote, texts)) is None:
            continue
        one, other = pair
        won = 1.0 if isinstance(vote, Preference) else 0.5
        points[one].append(won * _worth(texts[one], texts[other], band))
        points[other].append((1.0 - won) * _worth(texts[other], texts[one], band))
    return {each: math.fsum(own) / len(own) for each, own in points.items() if own}


def _worth(winner: str, loser: str, band: float | None) -> float:
    own, other = len(winner.strip()), len(loser.strip())
    if band is None:
        return 1.0
    return other / own if other * (1 - band) < own < other * (1 + band) else 0.0


def consistency(judgements: Sequence[Vote | None], scores: Mapping[int, float]) -> float | None:
    """The judge's reward, the mean over judgements; ``None`` if there is none about answers with a score."""
    values: list[float] = []
    for vote in judgements:
        if vote is None:
            values.append(-1.0)
        elif (pair := sides_among(vote, scores)) is not None:
            lead = scores[pair[0]] - scores[pair[1]] if isinstance(vote, Preference) else 0.0
            values.append(math.copysign(1.0, lead) if lead else 0.0)
    return math.fsum(values) / len(values) if values else None


def _check_band(band: float | None) -> None:
    if band is not None and not 0 < band < 1:
        raise ValueError(f"length_band must be above 0 and below 1, or None for no control; got {band}")


@dataclass(frozen=True, kw_only=True)
class Serl(JudgedReward, SolutionReward):
    """Copeland scores by a judge; needs no known answers."""

    length_band: float | None = LENGTH_BAND
    name: str = "serl"

    def __post_init__(self) -> None:
        _check_band(self.length_band)

    def matches(self, protocol: Protocol, num_agents: int) -> list[Match]:
        """Final solutions in pairs, in both orders."""
        last = len(protocol.rounds) - 1
        both = pairs(range(num_agents), TournamentPattern.ALL_PAIRS_BOTH_WAYS)
        return [((first, last), (second, last)) for first, second in both]

    async def ask(self, group: Solutions, question: str, models: Models) -> Solutions:
        """The comparisons of all pairs."""
        judge, both = self.needed(models.judge), TournamentPattern.ALL_PAIRS_BOTH_WAYS
        comparisons = await judge.tournament(question, group.by_id(), both, group.seed)
        return replace(group, comparisons=tuple(comparisons))

    def pay(self, group: Solutions) -> list[float]:
        """Copeland scores; 0 for a lone solution."""
        if group.comparisons is None:
            raise ValueError(
                f"the reward {self.name!r} needs comparisons of the solutions in pairs, which are not known here; "
                f"runs that were paid by serl or tournament have them stored. {JUDGE_REMEDY}"
            )
        if len(group) < 2:
            return [0.0] * len(group)
        matchup_count(group.comparisons, group.ids)  # raises
        scores = copeland([*map(judgement_of, group.comparisons)], group.by_id(), self.length_band)
        return [scores[each] for each in group.ids]

    def figures(self, group: Solutions) -> Metrics:
        """Health and accuracy of the judge, and the reward that its judgements would have."""
        judgements = [*map(judgement_of, group.comparisons or ())]
        value = consistency(judgements, copeland(judgements, group.by_id(), self.length_band))
        own: Metrics = {} if value is None else {"serl/judge_consistency": value}
        right = {} if group.graded_G is None else dict(zip(group.ids, group.graded_G, strict=True))
        correct = {each: reward > 0 for each, reward in right.items()}
        accuracy = judge_accuracy(group.comparisons or (), correct) if correct else {}
        return own | judge_health(group.comparisons or ()) | accuracy


def serl(*, length_band: float | None = LENGTH_BAND, judge: JudgeOptions | None = None) -> Serl:
    """SERL's actor reward: the Copeland score of a solution in comparisons of all pairs, in both orders.

    Args:
        length_band: A win counts only if the lengths differ by less than this share; ``None``: always.
        judge: By default the policy being trained.

    Raises:
        ValueError: If the band is out of range.
    """
    return Serl(length_band=length_band, judge_options=judge or JudgeOptions())


_SEGMENTS = ("proposal", "ranking", "revision", "verdict")


@dataclass(frozen=True, kw_only=True)
class SerlVotes(Reward):
    """Copeland scores by the agents' own ballots, and the ballots' agreement with them."""

    length_band: float | None = LENGTH_BAND
    name: str = "serl_votes"

    def __post_init__(self) -> None:
        _check_band(self.length_band)

    def check(self, protocol: Protocol, num_agents: int) -> None:
        """Refuse a protocol without ballots."""
        check_segments(self.name, protocol, _SEGMENTS, "pays solutions and the votes on them")

    def earning(self, protocol: Protocol, turns: Sequence[Turn]) -> list[bool]:
        """Solutions and the votes on the last ones."""
        can_earn = super().earning(protocol, turns)
        return [can and turn.segment in _SEGMENTS for can, turn in zip(can_earn, turns, strict=True)]

    async def score(self, played: Played) -> Scored:
        """Count the ballots."""
        earned = self.earned(played.conversation)
        first, judge = earned["proposal"], earned["verdict"]
        played.record["serl"] = {
            agent: {"initial": first.get(agent), "final": score, "judge": judge.get(agent)}
            for agent, score in earned["revision"].items()
        }
        credit = reply_credit(played, lambda turn: earned.get(turn.segment, {}).get(turn.agent_id))
        rewards = {(agent, 0): total for agent, total in _totals(earned).items()}
        return paid(played, Scored(rewards=rewards, credit=credit))

    async def stored_pay(
        self, record: ConversationRecord, seed: int, models: Models = NO_MODELS
    ) -> dict[int, float]:
        """Revision and verdict together."""
        check_segments(self.name, record, _SEGMENTS)
        return _totals(self.earned(record.conversation()))

    def earned(self, conversation: Conversation) -> dict[str, dict[int, float]]:
        """Rewards of proposals, revisions and verdicts, by segment and agent.

        Raises:
            ValueError: If no vote could be read about the revision of an agent that finished.
        """
        final = conversation.final_solutions
        first = {each: text for each, text in conversation.solutions("proposal").items() if each in final}
        ballots = ballots_by_segment(conversation)
        blind, last = ballots.get("ranking", {}), ballots.get("verdict", {})
        scores = copeland(pooled(last), final, self.length_band)
        if unjudged := sorted(set(final) - set(scores)):
            raise ValueError(
                f"no vote that could be read is about the revisions of agents {unjudged}, so they have no reward"
            )
        judged = {
            voter: consistency(own, scores) if own else -1.0 for voter, own in last.items() if voter in final
        }
        return {
            "proposal": copeland(pooled(blind), first, self.length_band),
            "revision": scores,
            "verdict": {voter: value for voter, value in judged.items() if value is not None},
        }


def _totals(earned: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
    """Revision and verdict together, by agent."""
    return {agent: score + earned["verdict"].get(agent, 0.0) for agent, score in earned["revision"].items()}


def serl_votes(*, length_band: float | None = LENGTH_BAND) -> SerlVotes:
    """SERL with the agents as judges: Copeland scores of their ballots, and the ballots' agreement with them.

    Args:
        length_band: As of `serl`.

    Raises:
        ValueError: If it is out of range.
    """
    return SerlVotes(length_band=length_band)
