"""Signs, without known answers, that votes and answers no longer mean what they should: figures of one step.

A sign is a number that any run of conversations has; `viva.run.alarms` watches them over steps. All votes of a step are
pooled: those of ballots, and those of a judge's comparisons.

- ``sign/answer_votes``: of the votes between a solution with the answer that most agents gave and one with another
  answer, the share for the former; ties count half. Voters who look at the solutions prefer it more often than not
  wherever the majority is right more often than not.
- ``sign/against_majority``: of the votes on pairs that the other voters decide, the share against them, ties half.
- ``sign/mutual_votes``: do voters favour those who favour them? See `viva.judging.ballots.mutual_votes`.
- ``sign/against_initial_judge``: of the votes on pairs of final solutions that the policy at the start judged, too
  (``initial_judge_pairs``), the share against its scores of both orders together, ties half.
- ``sign/order_flips``: of the pairs that were judged in both orders, the share whose winner changes with the order.
- ``sign/length_votes``: of the votes between solutions of different length, the share for the longer; ties count half.
- ``sign/length_pay``: Spearman's correlation of reward and length of the final solution, mean over conversations.
- ``sign/ties``, ``sign/invalid``: share of ties among votes; of ballots without a vote and of unreadable comparisons.
- ``sign/answer_entropy``, ``sign/length_entropy``: entropy of all final answers of the step, and of the lengths of all
  final solutions, over that of as many different ones. 0: one answer to all questions, or one length.

What could not be counted is left out. Lengths are in characters.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from viva.conversation.records import Conversation, Solution
from viva.judging.answers import answer_key
from viva.judging.ballots import (
    Ballots,
    Item,
    Preference,
    Tie,
    Vote,
    agreement,
    mutual_votes,
    order_flips,
    sides_of,
)
from viva.judging.comparison import Outcome, label_comparisons, pair_flips, rank_correlation
from viva.judging.ranking import LabelBallot
from viva.judging.records import ComparisonRecord, ConversationRecord, ballots_by_segment

_TextVote: TypeAlias = tuple[str, str, float]
"""Two solutions and the share of a vote for the first: 1, or 0.5 for a tie."""


def signs(records: Iterable[ConversationRecord]) -> dict[str, float]:
    """Figures of one step's conversations; those without anything to count are left out."""
    counted: dict[str, list[float]] = defaultdict(list)
    solutions: list[str] = []
    for record in records:
        conversation = record.conversation()
        final = conversation.final_solutions
        solutions += final.values()
        votes: list[_TextVote] = []
        for segment, ballots in ballots_by_segment(conversation).items():
            answers = [
                turn.response
                for turn in conversation.turns
                if turn.segment == segment and isinstance(turn.response, LabelBallot)
            ]
            texts = texts_before(conversation, segment)
            votes += _count_ballots(counted, ballots, texts, by_voters=not answers)
            for answer in answers:
                counted["order_flips"] += pair_flips(label_comparisons(answer))
        votes += _count_comparisons(counted, record.comparisons, conversation)
        counted["against_initial_judge"] += _against_initial_judge(
            votes, record.initial_judge_comparisons, final
        )
        lengths = {agent_id: float(len(text)) for agent_id, text in final.items()}
        pay = {agent_id: reward for agent_id, reward in record.rewards.items() if agent_id in lengths}
        if len(pay) > 1 and (found := rank_correlation(pay, lengths)) is not None:
            counted["length_pay"].append(found)
    means = {f"sign/{name}": statistics.fmean(values) for name, values in counted.items() if values}
    return means | _entropies(solutions)


def texts_before(conversation: Conversation, segment: str) -> dict[Item, str]:
    """The solutions that the voters of a segment saw: each agent's last one before, or first and last by stage."""
    first = min(turn.round_index for turn in conversation.turns if turn.segment == segment)
    texts: dict[Item, str] = {}
    for turn in conversation.turns:
        if turn.round_index < first and isinstance(turn.response, Solution):
            texts.setdefault(("initial", turn.agent_id), turn.response.solution)
            texts[("revised", turn.agent_id)] = texts[turn.agent_id] = turn.response.solution
    return texts


def _count_ballots(
    counted: dict[str, list[float]], ballots: Ballots, texts: Mapping[Item, str], *, by_voters: bool
) -> list[_TextVote]:
    """Add what the ballots of one round show; their votes. With ``by_voters``, half of them saw each order."""
    counted["invalid"] += [float(not votes) for votes in ballots.values()]
    votes = [vote for own in ballots.values() for vote in own]
    judged = {item: texts[item] for vote in votes for item in sides_of(vote) if item in texts}
    seen = _count_votes(counted, votes, texts, _common(judged))
    kept = {voter: votes for voter, votes in ballots.items() if votes}
    agreed = agreement(kept, leave_one_out=True)
    counted["against_majority"] += [1 - share for share in agreed.values() if share is not None]
    if by_voters:
        flips = order_flips(kept, [voter for voter in kept if voter % 2 == 0])
        counted["order_flips"] += [float(flip) for flip in flips]
    about_voters = {
        voter: [vote for vote in own if all(isinstance(item, int) for item in sides_of(vote))]
        for voter, own in kept.items()
    }
    if (found := mutual_votes(about_voters)) is not None:
        counted["mutual_votes"].append(found)
    return seen


def _count_comparisons(
    counted: dict[str, list[float]], comparisons: Sequence[ComparisonRecord], conversation: Conversation
) -> list[_TextVote]:
    """Add what a judge's comparisons show; their votes."""
    seen: list[_TextVote] = []
    first, final = conversation.first_solutions, conversation.final_solutions
    common = _common({**final})
    winners: dict[tuple[Item, Item], Item | None] = {}
    for each in (each for each in comparisons if each.was_asked):
        if each.agent_id is None:
            sides: tuple[Item, Item] = (each.first, each.second)
            texts: dict[Item, str] = {**final}
        else:  # an agent's two solutions, which are no pair for anything about majorities
            sides = (f"initial {each.agent_id}", each.first), (f"initial {each.agent_id}", each.second)
            both = (first.get(each.agent_id, ""), final.get(each.agent_id, ""))
            texts = dict(zip(sides, (both[each.first], both[each.second]), strict=True))
        counted["invalid"].append(float(each.outcome == Outcome.INVALID))
        if each.outcome == Outcome.INVALID:
            continue
        vote: Vote = Tie(*sides)
        if each.outcome != Outcome.TIE:
            vote = Preference(*(sides if each.outcome == Outcome.A else sides[::-1]))
        winners[sides] = vote.winner if isinstance(vote, Preference) else None
        seen += _count_votes(counted, [vote], texts, common if each.agent_id is None else ())
    for (one, other), winner in winners.items():
        if str(one) < str(other) and (other, one) in winners:
            turned = winners[other, one]
            counted["order_flips"].append(float(winner != turned and None not in (winner, turned)))
    return seen


def _count_votes(
    counted: dict[str, list[float]],
    votes: Sequence[Vote],
    texts: Mapping[Item, str],
    common: Collection[Item],
) -> list[_TextVote]:
    """Add what votes show about texts, of which the common ones have the answer that most have; votes on texts."""
    seen: list[_TextVote] = []
    counted["ties"] += [float(isinstance(vote, Tie)) for vote in votes]
    for vote in votes:
        one, other = sides_of(vote)
        if one not in texts or other not in texts:
            continue
        share = 0.5 if isinstance(vote, Tie) else 1.0
        seen.append((texts[one], texts[other], share))
        if len(texts[one]) != len(texts[other]):
            is_longer = len(texts[one]) > len(texts[other])
            counted["length_votes"].append(share if is_longer else 1.0 - share)
        if (one in common) != (other in common):
            counted["answer_votes"].append(share if one in common else 1.0 - share)
    return seen


def _against_initial_judge(
    votes: Sequence[_TextVote], comparisons: Sequence[ComparisonRecord], solutions: Mapping[int, str]
) -> list[float]:
    """Whether each vote on a compared pair is against the scores of both orders; a tie is half."""
    scores: dict[tuple[str, str], float] = {}
    for each in comparisons:
        if each.score is not None:
            shown = (solutions[each.first], solutions[each.second])
            scores[shown] = scores.get(shown, 0.0) + each.score
    found: list[float] = []
    for one, other, share in votes:
        # a score below 0 is for the solution that was shown first
        score = scores.get((one, other), 0.0) - scores.get((other, one), 0.0)
        if score:
            found.append(share if score > 0 else 1.0 - share)
    return found


def _common(texts: Mapping[Item, str]) -> set[Item]:
    """The items whose answer is the most frequent one; none, if several answers are."""
    keys = {item: answer_key(text) for item, text in texts.items()}
    counts = Counter(key for key in keys.values() if key is not None).most_common(2)
    if not counts or (len(counts) == 2 and counts[0][1] == counts[1][1]):
        return set()
    return {item for item, key in keys.items() if key == counts[0][0]}


def _entropies(solutions: Sequence[str]) -> dict[str, float]:
    """Whether the final solutions of a step have collapsed to one answer, or to one length."""
    if len(solutions) < 2:
        return {}
    return {
        "sign/answer_entropy": _entropy([answer_key(text) for text in solutions]),
        "sign/length_entropy": _entropy([len(text) for text in solutions]),
    }


def _entropy(values: Sequence[object]) -> float:
    """In [0, 1]: 0 if all are equal, 1 if no two are."""
    counts = Counter(values).values()
    return math.log(len(values)) ** -1 * math.fsum(
        n / len(values) * math.log(len(values) / n) for n in counts
    )
