"""The rewards of critique self-play (CoNL, arXiv 2601.21464) as one reward of a conversation.

Scores come from `viva.rewards.review`; each is credited to the sampled tokens that earned it:

    round 0  proposal   the whole reply                 r_sol of the initial solution
    round 1  ranking    masked                          -
    round 1  critique   each critique's own tokens      the gain of its target (or the reply, r_diag)
    round 2  revision   the whole reply                 r_sol
    round 3  verdict    the whole reply                 r_meta; nothing if no vote could be compared

What cannot be located on the sampled ids earns nothing.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from tinker_cookbook.rl.types import Metrics

from viva.conversation.coordinator import gather_or_cancel
from viva.conversation.protocol import Protocol
from viva.conversation.records import Conversation, CritiqueReply, Revision, Turn
from viva.judging.ballots import Item, ballot_accuracy, ballot_health
from viva.judging.comparison import (
    Comparison,
    Judge,
    TournamentPattern,
    judge_accuracy,
    judge_health,
    label_comparisons,
    rank_correlation,
    reward_truth_gap,
    same_words,
)
from viva.judging.judge import JudgeOptions
from viva.judging.ranking import LabelBallot, RankingReply
from viva.judging.records import ConversationRecord, ballots_by_segment
from viva.rewards.base import (
    JUDGE_REMEDY,
    NO_MODELS,
    Earnings,
    Match,
    Models,
    Played,
    Reward,
    Scored,
    segment_credit,
    spoken,
    stored_comparisons,
    stream_of,
    truth_metrics,
    whole_reply,
)
from viva.rewards.credit import GroupCredit, token_ranges
from viva.rewards.review import (
    STREAMS,
    ReviewRules,
    ReviewScores,
    ReviewVotes,
    duel_of,
    initial,
    revised,
    score_review,
    stored_rules,
)

Judged = dict[int, list[Comparison]]
"""By agent: its initial solution (item 0) against its revised one (item 1), in both orders."""

SEGMENTS = ("proposal", "ranking", "critique", "revision", "verdict")
"""The segments that are scored."""


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

    def judged_by(self, judge: JudgeOptions) -> "PeerReview":
        """The same reward with another judge, where it has one."""
        return self if self.compared_by is None else replace(self, compared_by=judge)

    def only(self, stream: str) -> "PeerReview":
        """The same rules, paying one stream; a `ValueError` if there is no such stream."""
        if stream not in STREAMS:
            raise ValueError(f"a stream of peer review is one of {', '.join(STREAMS)}; got {stream!r}")
        weights = {name: float(name == stream) for name in STREAMS}
        return replace(self, rules=replace(self.rules, weights=weights), name=stream)

    def matches(self, protocol: Protocol, num_agents: int) -> list[Match]:
        """Every agent's first solution against its revised one, in both orders."""
        own = [((agent_id, 0), (agent_id, 2)) for agent_id in range(num_agents)]
        return [match for first, second in own for match in ((first, second), (second, first))]

    def check(self, protocol: Protocol, num_agents: int) -> None:
        """Refuse a protocol without the segments that are scored.

        Where nobody criticises, the stream r_diag stays empty beside others, and is refused alone.
        """
        needed = (*SEGMENTS, "comparison") if self.agents_compare else SEGMENTS
        if self._paid_streams - {"r_diag"}:
            needed = tuple(name for name in needed if name != "critique")
        check_segments(self.name, protocol, needed, "scores proposals, critiques and votes")
        verdicts = [each for round_ in protocol.rounds for each in round_.segments if each.name == "verdict"]
        if self._paid_streams == {"r_meta"} and all(each.votes_on is not None for each in verdicts):
            raise ValueError(
                f"the reward {self.name!r} pays the tokens of verdicts alone, and in protocol {protocol.name!r} they "
                "are label probabilities, of which no token is sampled; use ballots=written, or another reward"
            )

    def earning(self, protocol: Protocol, turns: Sequence[Turn]) -> list[bool]:
        """Those of streams with a weight."""
        paid_streams = self._paid_streams
        return [stream_of(protocol, turn) in paid_streams for turn in turns]

    @property
    def _paid_streams(self) -> set[str]:
        return {stream for stream, weight in self.rules.weights.items() if weight}

    @property
    def agents_compare(self) -> bool:
        """Whether the agents compare revised with first solutions, in a last round."""
        return self.rules.fit == "joint" and self.compared_by is None

    def new_record(self, protocol: Protocol, judge: Judge | None) -> dict[str, object]:
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
            Weighted rewards: the first lane of an agent has r_sol, r_meta and the metrics, the second r_diag; a lane
            whose weights are all 0 has none. The credit is what trains.
        """
        conversation = played.conversation
        judged = await self.judged(played)
        votes = review_votes(conversation, judged)
        scores = score_review(votes, self.rules)
        credit = review_credit(
            played,
            {"proposal": scores.r_sol_initial, "revision": scores.r_sol, "verdict": scores.r_meta},
            scores.r_diag_by_target,
            self.rules.weights,
            by_reply=self.rules.diag_credit == "reply",
        )
        correct = played.graded(conversation.solutions("revision"))
        correct_initial = played.graded(conversation.solutions("proposal"))
        played.record.update(
            scores=scores.record(),
            streams=scores.streams(),
            rewards=scores.totals,
            correct=correct,
            correct_initial=correct_initial,
        )
        metrics_A = _metrics(
            conversation, scores, votes, judged, correct_initial=correct_initial, correct=correct
        )
        paid_streams, rewards = self._paid_streams, dict[tuple[int, int], float]()
        for agent_id, total in scores.totals.items():
            diag = self.rules.weights["r_diag"] * scores.r_diag[agent_id]
            if paid_streams - {"r_diag"}:
                rewards[agent_id, 0] = total - diag
            if "r_diag" in paid_streams:
                rewards[agent_id, 1] = diag
        return Scored(rewards=rewards, metrics=metrics_A, credit=credit)

    async def stored_pay(
        self, record: ConversationRecord, seed: int, models: Models = NO_MODELS
    ) -> dict[int, float]:
        """The weighted streams by the stored rules, or one of them."""
        # where nobody criticised, nothing is paid for it
        asked = [name for name in SEGMENTS if name != "critique" or self.name == "r_diag"]
        check_segments(self.name, record, asked)
        rules = replace(stored_rules(record), weights=self.rules.weights) if record.rules else self.rules
        scores = score_review(await stored_votes(record, rules, seed, models.judge), rules)
        stream = self.name if self.name in STREAMS else "total"
        own_A = {agent_id: own[stream] for agent_id, own in scores.streams().items()}
        return {agent_id: value for agent_id, value in own_A.items() if value is not None}

    async def judged(self, played: Played) -> Judged:
        """The judge's comparisons of every agent's two solutions, where they differ, all in flight together.

        They are told to the transcript, too.
        """
        if self.rules.fit != "joint" or played.judge is None:
            return {}
        judged = await compare_revisions(played.conversation, played.judge, played.seed)
        played.record["comparisons"] = [
            {"agent_id": agent_id, **asdict(comparison)}
            for agent_id, comparisons in judged.items()
            for comparison in comparisons
        ]
        return judged


async def compare_revisions(conversation: Conversation, judge: Judge, seed: int) -> Judged:
    """A judge's comparisons of every agent's two solutions, where they differ, all in flight together."""
    before, after = conversation.solutions("proposal"), conversation.final_solutions
    changed = [agent_id for agent_id in after if not same_words(before[agent_id], after[agent_id])]
    if changed:
        judge = await judge.for_question(conversation.question, seed)
    tournaments = await gather_or_cancel(
        judge.tournament(
            conversation.question,
            {0: before[agent_id], 1: after[agent_id]},
            TournamentPattern.ALL_PAIRS_BOTH_WAYS,
            random.Random(f"{seed}/judge/{agent_id}").getrandbits(31),
        )
        for agent_id in changed
    )
    return dict(zip(changed, tournaments, strict=True))


async def stored_votes(
    record: ConversationRecord, rules: ReviewRules, seed: int, judge: Judge | None = None
) -> ReviewVotes:
    """The votes of a stored conversation; refused if a joint fit has nothing that links the two rounds.

    A judge, if there is one, compares revised with first solutions of a joint fit anew, in the place of what is stored.
    """
    conversation = record.conversation()
    if judge is not None and rules.fit == "joint":
        anew = await compare_revisions(conversation, judge, seed)
        return replace(review_votes(conversation, anew), across={})
    judged = {agent: found for agent, found in stored_comparisons(record).items() if agent is not None}
    before, after = conversation.solutions("proposal"), conversation.solutions("revision")
    has_changed = any(not same_words(before[agent], after[agent]) for agent in after)
    is_linked = bool(judged) or any(turn.segment == "comparison" for turn in conversation.turns)
    if rules.fit == "joint" and has_changed and not is_linked:
        raise ValueError(
            "fit=joint needs comparisons of revised with initial solutions, and none are stored: a run by the paper "
            "preset makes none, nor does one by a reward that needs none. Without them nothing says how the two rounds "
            "compare, so no gain could be measured. Add fit=separate for two scales, on which nobody gains where all "
            f"improve alike. {JUDGE_REMEDY}."
        )
    return review_votes(conversation, judged)


def check_segments(
    name: str, of: Protocol | ConversationRecord, needed: Iterable[str], what: str = "pays critique self-play"
) -> None:
    """Refuse a protocol, or a stored conversation, without the segments that a reward looks at."""
    if isinstance(of, Protocol):
        has, title = {segment.name for round_ in of.rounds for segment in round_.segments}, of.name
    else:
        has, title = {turn.segment for turn in of.turns}, of.protocol
    if missing := sorted(set(needed) - has):
        raise ValueError(
            f"the reward {name!r} {what}; protocol {title!r} does not ask for {', '.join(missing)}. Use "
            "viva.selfplay.critique (the recipe critique_self_play), or another reward."
        )


def review_votes(conversation: Conversation, judged: Judged) -> ReviewVotes:
    """The votes of one conversation: ballots of both rounds, who criticised whom, and revised against initial.

    Agents that failed are not scored; what they said before still counts.
    """
    failed = {failure.agent_id for failure in conversation.failures}
    before, after = conversation.solutions("proposal"), conversation.solutions("revision")
    agents = tuple(agent_id for agent_id in sorted(after) if agent_id not in failed)
    ballots = ballots_by_segment(conversation)
    sides = (initial, revised)
    duels = [
        duel_of(comparison, sides[comparison.first](agent_id), sides[comparison.second](agent_id))
        for agent_id, comparisons in judged.items()
        for comparison in comparisons
    ]
    texts: dict[Item, str] = {initial(agent_id): before[agent_id] for agent_id in agents}
    return ReviewVotes(
        agents=agents,
        initial=ballots.get("ranking", {}),
        final=ballots.get("verdict", {}),
        targets={
            turn.agent_id: [critique.target for critique in turn.response.critiques]
            for turn in conversation.turns
            if isinstance(turn.response, CritiqueReply)
        },
        across=ballots.get("comparison", {}),
        duels=tuple(duel for duel in duels if duel is not None),
        final_is_sampled=not any(
            isinstance(turn.response, LabelBallot) for turn in conversation.turns if turn.segment == "verdict"
        ),
        texts=texts | {revised(agent_id): after[agent_id] for agent_id in agents},
    )


def review_credit(
    played: Played,
    replies: Mapping[str, Mapping[int, float | None]],
    critiques: Mapping[int, Mapping[int, float]],
    weights: Mapping[str, float],
    *,
    by_reply: bool = False,
) -> GroupCredit:
    """Credit on whole replies by segment and agent, and on the tokens of each critique by critic and target.

    Critiques of other targets earn nothing, and neither do a critic's calls of tools. With ``by_reply``, where all
    targets of a critic are worth the same, all tokens of its reply earn that.
    """

    def earned(turn: Turn, tokens_T: Sequence[int]) -> Earnings:
        if not isinstance(turn.response, CritiqueReply):
            return whole_reply(tokens_T, replies.get(turn.segment, {}).get(turn.agent_id))
        paid = critiques[turn.agent_id]
        found = [critique for critique in turn.response.critiques if critique.target in paid]
        if by_reply:
            return whole_reply(tokens_T, paid[found[0].target] if found else None)
        ranges = [(critique.start, critique.stop) for critique in found]
        spans = token_ranges(played.renderer, tokens_T, turn.text, ranges)
        return [
            (*span, paid[critique.target])
            for critique, span in zip(found, spans, strict=True)
            if span is not None
        ]

    return segment_credit(played, earned, weights)


def _metrics(
    conversation: Conversation,
    scores: ReviewScores,
    votes: ReviewVotes,
    judged: Mapping[int, Sequence[Comparison]],
    *,
    correct_initial: Mapping[int, bool] | None,
    correct: Mapping[int, bool] | None,
) -> dict[int, Metrics]:
    """Metrics by agent that finished; what is about the whole conversation is reported by each of them."""
    shared = _health(conversation, votes) | revision_judge_figures(judged, correct_initial, correct)
    if correct_initial is not None and correct is not None:
        shared |= _truth(scores, votes, correct_initial, correct)
    truth_A = truth_metrics(correct_initial, correct)
    received = Counter(
        critique.target
        for turn in conversation.turns
        if isinstance(turn.response, CritiqueReply)
        for critique in turn.response.critiques
    )
    metrics_A: dict[int, Metrics] = {}
    for agent_id in votes.agents:
        before, after = scores.initial[agent_id].value, scores.final[agent_id].value
        gain = scores.gains[agent_id]
        own: Metrics = {
            "critiques/received": received[agent_id],
            f"agent_{agent_id}/reward": scores.totals[agent_id],
            f"agent_{agent_id}/score_initial": before,
            f"agent_{agent_id}/score_final": after,
            f"agent_{agent_id}/score_change": after - before,
            "gain/mean": gain.value,
            "gain/paid": gain.paid,
            "gain/measured": float(gain.measured),
        }
        said = spoken(conversation, agent_id) | _said(conversation, agent_id)
        metrics_A[agent_id] = said | own | truth_A.get(agent_id, {}) | shared
    return metrics_A


def _said(conversation: Conversation, agent_id: int) -> Metrics:
    """An agent's critiques and revision, in numbers."""
    metrics: Metrics = {}
    before = conversation.solutions("proposal")[agent_id]
    for response in [turn.response for turn in conversation.turns if turn.agent_id == agent_id]:
        if isinstance(response, CritiqueReply):
            metrics["critiques/given"] = len(response.critiques)
            metrics["critiques/dropped"] = sum(response.dropped.values())
        elif isinstance(response, Revision):
            metrics["revision/changed"] = float(not same_words(before, response.solution))
            metrics["revision/says_revise"] = float(response.decision == "revise")
            metrics["revision/says_defend"] = float(response.decision == "defend")
    return metrics


def _health(conversation: Conversation, votes: ReviewVotes) -> Metrics:
    """Health of the blind ranking and of the verdict; agents with an even id saw one order, the others its reverse."""
    metrics: Metrics = {}
    for name, ballots, segment in (
        ("ranking", votes.initial, "proposal"),
        ("verdict", votes.final, "revision"),
    ):
        replies = [
            (turn.agent_id, turn.response)
            for turn in conversation.turns
            if turn.segment == name and isinstance(turn.response, RankingReply)
        ]
        figures = ballot_health(
            ballots,
            forward=[voter for voter in ballots if voter % 2 == 0],
            # also of agents that failed later: they were voted on
            lengths={agent_id: len(text) for agent_id, text in conversation.solutions(segment).items()},
            unreadable=[voter for voter, reply in replies if reply.dropped.get("unreadable")],
        )
        labelled = [reply for _, reply in replies if isinstance(reply, LabelBallot)]
        if labelled:
            figures = _means(judge_health(label_comparisons(each)) for each in labelled) | figures
            figures.pop("order_flips", None)  # each voter saw both orders
            figures["sampled"] = 0.0
        metrics |= {f"judge/{name}/{figure}": value for figure, value in figures.items()}
    return metrics


def revision_judge_figures(
    judged: Mapping[int, Sequence[Comparison]],
    correct_initial: Mapping[int, bool] | None,
    correct: Mapping[int, bool] | None,
) -> Metrics:
    """Health of the judge that compares revised with initial solutions, and its accuracy where answers are known.

    Means over the agents that it was asked about; accuracy over those of whose two solutions one is right.
    """
    figures = _means(map(judge_health, judged.values()))
    if correct_initial is not None and correct is not None:
        figures |= _means(
            judge_accuracy(comparisons, {0: correct_initial[agent_id], 1: correct[agent_id]})
            for agent_id, comparisons in judged.items()
            if agent_id in correct
        )
    return {f"judge/revision/{name}": value for name, value in figures.items()}


def _means(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Means over voters of figures of a judge, without the prefix."""
    columns: dict[str, list[float]] = {}
    for own in figures:
        for name, value in own.items():
            columns.setdefault(name.removeprefix("judge/"), []).append(value)
    return {name: math.fsum(column) / len(column) for name, column in columns.items()}


def _truth(
    scores: ReviewScores,
    votes: ReviewVotes,
    correct_initial: Mapping[int, bool],
    correct: Mapping[int, bool],
) -> Metrics:
    """Agreement of scores and ballots with the known answers; what has nothing to compare is left out."""
    final = {agent_id: scores.final[agent_id].value for agent_id in votes.agents}
    best = max(final.values())
    chosen = [correct[agent_id] for agent_id, score in final.items() if score == best]
    figures: dict[str, float | None] = {
        "correct/best": sum(chosen) / len(chosen),
        "rank_correlation": rank_correlation(final, correct),
        "reward_truth_gap": reward_truth_gap(final, correct),
        "judge/ranking/accuracy": ballot_accuracy(votes.initial, correct_initial),
        "judge/verdict/accuracy": ballot_accuracy(votes.final, correct),
    }
    return {name: value for name, value in figures.items() if value is not None}
