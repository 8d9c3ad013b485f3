"""Whether critics classify solutions better than the judge does, on conversations of critique self-play.

A critique counts where its last words are a verdict ("72 is right.", "this is wrong"), as in the protocol's own
critiques; in free text there is none, and nothing is guessed. All accuracies are of the same pairs of a right and a
wrong first solution of one conversation, so that they can be compared, and chance is one half: a critic's pair is the
two verdicts that it gave, a vote of the blind ranking is on a pair, and the judge compares the pair in both orders.
Equal verdicts and ties count half.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from viva.conversation.coordinator import gather_or_cancel
from viva.conversation.records import CritiqueReply, Solution
from viva.eval.estimates import Terms
from viva.experts.strategy import record_of
from viva.judging.ballots import Vote, ballot_accuracy
from viva.judging.comparison import Comparison, Judge, judge_accuracy
from viva.judging.records import ConversationRecord
from viva.training.console import Begin, unseen
from viva.training.data import derive_seed
from viva.training.rollouts import GroupOutcome

_LONGEST_ENDING = 80
"""Characters of a critique's end in which its verdict is looked for."""
_VERDICT = re.compile(
    r"(?<!\bwhat )\b(?:is|looks|seems)\s+[*_\"']*(?:(?P<right>right|correct)|(?P<wrong>wrong|incorrect))[\s.!*_\"')]*$",
    re.I,
)
_NOTHING = (0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One critique's verdict on a solution."""

    critic: int
    target: int
    says_right: bool | None
    """``None``: it does not end in a verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criticised:
    """One conversation's first solutions, and what was said of them."""

    question: str
    solutions: dict[int, str]
    """By agent id; those whose rightness is known."""
    correct: dict[int, bool]
    verdicts: tuple[Verdict, ...]
    ballots: dict[int, list[Vote]]
    """Votes of the blind ranking, by voter."""
    judged: tuple[Comparison, ...] = ()

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """All pairs of a right and a wrong solution."""
        right = [agent_id for agent_id, is_right in self.correct.items() if is_right]
        return [(a, b) for a in right for b, is_right in self.correct.items() if not is_right]


def verdict_of(text: str) -> bool | None:
    """Whether a critique ends by calling what it criticises right; ``None`` if it ends in no verdict."""
    found = _VERDICT.search(text.rstrip()[-_LONGEST_ENDING:])
    return None if found is None else found["right"] is not None


def criticised(outcomes: Sequence[GroupOutcome]) -> tuple[Criticised, ...]:
    """The conversations that were held to their end, with graded first solutions."""
    found: list[Criticised] = []
    for outcome in outcomes:
        if outcome.group is None:
            continue
        record = ConversationRecord.model_validate(record_of(outcome.builder))
        if record.correct_initial is not None:
            found.append(_read(record, record.correct_initial))
    return tuple(found)


def _read(record: ConversationRecord, graded: Mapping[int, bool]) -> Criticised:
    solutions = {
        turn.agent_id: turn.response.solution
        for turn in record.turns
        if turn.segment == "proposal" and isinstance(turn.response, Solution) and turn.agent_id in graded
    }
    verdicts = [
        Verdict(critic=turn.agent_id, target=critique.target, says_right=verdict_of(critique.text))
        for turn in record.turns
        if isinstance(turn.response, CritiqueReply)
        for critique in turn.response.critiques
        if critique.target in solutions
    ]
    return Criticised(
        question=record.question,
        solutions=solutions,
        correct={agent_id: graded[agent_id] for agent_id in solutions},
        verdicts=tuple(verdicts),
        ballots=record.ballots().get("ranking", {}),
    )


async def have_pairs_judged(
    talks: Sequence[Criticised], judge: Judge, seed: int, *, most: int, begin: Begin = unseen
) -> tuple[Criticised, ...]:
    """The same with their pairs judged in both orders, of the first conversations up to so many pairs."""
    chosen = [(place, pair) for place, talk in enumerate(talks) for pair in talk.pairs][:most]
    progress = begin("critics' pairs", len(chosen), "pairs")

    async def compare(place: int, right: int, wrong: int) -> list[Comparison]:
        talk, place_seed = talks[place], derive_seed(seed, "critics' pairs", place, right, wrong)
        both = await gather_or_cancel(
            judge.compare(talk.question, talk.solutions, *order, place_seed)
            for order in ((right, wrong), (wrong, right))
        )
        progress.on_group(both)
        return both

    found = await gather_or_cancel(compare(place, *pair) for place, pair in chosen)
    by_place: dict[int, list[Comparison]] = {}
    for (place, _), both in zip(chosen, found, strict=True):
        by_place.setdefault(place, []).extend(both)
    return tuple(replace(talk, judged=tuple(by_place.get(place, ()))) for place, talk in enumerate(talks))


def critic_figures(talks: Sequence[Criticised]) -> dict[str, Terms]:
    """Figures by conversation; those of pairs are means over them, so that a conversation counts once."""
    if not talks:
        return {}
    measures = {"critics": _critic_pairs, "ballots": _ballot_pairs, "judge": _judge_pairs}
    columns = {name: [measure(talk) for talk in talks] for name, measure in measures.items()}
    figures: dict[str, Terms] = {
        "critics/readable": [
            (sum(each.says_right is not None for each in talk.verdicts), len(talk.verdicts)) for talk in talks
        ],
        "critics/true": [_true_verdicts(talk) for talk in talks],
    }
    for name, values in columns.items():
        figures[f"{name}/pair_accuracy"] = [_NOTHING if value is None else (value, 1.0) for value in values]
    for name in ("critics", "ballots"):
        figures[f"{name}_less_judge"] = [
            _NOTHING if own is None or other is None else (own - other, 1.0)
            for own, other in zip(columns[name], columns["judge"], strict=True)
        ]
    return figures


def _true_verdicts(talk: Criticised) -> tuple[float, float]:
    told = [each for each in talk.verdicts if each.says_right is not None]
    return sum(each.says_right is talk.correct[each.target] for each in told), len(told)


def _mean(points: Sequence[float]) -> float | None:
    return math.fsum(points) / len(points) if points else None


def _critic_pairs(talk: Criticised) -> float | None:
    said = {(each.critic, each.target): each.says_right for each in talk.verdicts}
    points: list[float] = []
    for right, wrong in talk.pairs:
        for critic in talk.correct:
            good, bad = said.get((critic, right)), said.get((critic, wrong))
            if good is not None and bad is not None:
                points.append(0.5 + 0.5 * (good - bad))
    return _mean(points)


def _ballot_pairs(talk: Criticised) -> float | None:
    return ballot_accuracy(talk.ballots, talk.correct)


def _judge_pairs(talk: Criticised) -> float | None:
    return judge_accuracy(talk.judged, talk.correct).get("judge/accuracy")
