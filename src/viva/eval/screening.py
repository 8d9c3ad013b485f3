"""Screening a model for a task before a run is paid for: what it answers, and how it judges pairs of its answers.

Critics are compared with the judge on conversations of critique self-play. A critique counts where its last words are a
verdict ("72 is right.", "this is wrong"); in free text there is none, and nothing is guessed. All accuracies are of the
same pairs of a right and a wrong first solution of one conversation, and chance is one half: a critic's pair is the two
verdicts that it gave, a vote of the blind ranking is on a pair, and the judge compares the pair in both orders. Equal
verdicts and ties count half.

Legend: ``_P`` problems, ``_N`` answers to one problem.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from viva.conversation.coordinator import gather_or_cancel
from viva.conversation.records import CritiqueReply, Solution
from viva.eval.direct import DirectSampler
from viva.eval.judged import FAILURES, failed_both_ways, reason_of
from viva.eval.records import Answer, Figure, PlayedProblem, TokenCost, is_lenient, write_json
from viva.experts.strategy import record_of
from viva.judging.answers import AnswerCheck, extract_answer, marked_answer
from viva.judging.ballots import Vote
from viva.judging.comparison import Comparison, Judge, TournamentPattern
from viva.judging.judge import SamplingClient
from viva.judging.records import ConversationRecord
from viva.rewards.base import Models
from viva.rewards.solutions import SolutionReward, Solutions
from viva.training.console import Begin, unseen
from viva.training.data import PromptItem, derive_seed
from viva.training.rollouts import GroupOutcome

FORMAT = "viva screen 1"
"""First key of the file."""
_SHORT_REPLY = 5
"""Words up to which a reply without mark or number is taken to be an answer as a whole."""
_LONGEST_ENDING = 80
"""Characters of a critique's end in which its verdict is looked for."""
_BOTH_WAYS = TournamentPattern.ALL_PAIRS_BOTH_WAYS
_VERDICT = re.compile(
    r"(?<!\bwhat )\b(?:is|looks|seems)\s+[*_\"']*(?:(?P<right>right|correct)|(?P<wrong>wrong|incorrect))[\s.!*_\"')]*$",
    re.I,
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One answer, drawn as in training."""

    answer: Answer
    logprob: float
    """Log-probability of the whole reply under the sampler, in nats."""
    has_answer: bool
    """Finished, and an answer can be read out of it."""
    is_lenient: bool
    """It is right, or the known answer stands somewhere in the reply, finished or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Two answers to one problem, compared in both orders."""

    first: int
    """Number of an answer; the right one where answers are known."""
    second: int
    both: tuple[Comparison, Comparison]


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """One problem with all answers to it."""

    question: str
    answer: str | None
    greedy: Try
    """At temperature 0."""
    tries_N: tuple[Try, ...]
    judged: Judged | None = None
    rubric: dict[int, tuple[float | None, ...]] | None = None
    """A judge's scores by number of each answer that was given, where a reward of ``rubric`` was asked for; ``None``:
    unreadable, or the judge failed."""
    failure: str | None = None
    """Reason why the judge gave no scores."""

    @property
    def given(self) -> list[int]:
        """Numbers of the answers that were given: none is where the problem does not fit into the context."""
        return [number for number, one in enumerate(self.tries_N) if one.answer.num_tokens]


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice about a reward, or about how to sample."""

    about: str
    """A reward's name, or what an option is about."""
    verdict: str
    """``works``, ``fails``, ``unclear`` for rewards; ``note`` for anything else."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Screening:
    """All that was found out about a model and a task."""

    target: dict[str, Any]
    """The policy's name, kind, model, checkpoint and next_step."""
    task: str
    """Number of problems, and their origin."""
    options: dict[str, Any]
    """All that decides what is sampled and how it is graded."""
    prompts_digest: str
    has_answers: bool
    problems: tuple[Screened, ...]
    played: dict[str, tuple[PlayedProblem, ...]]
    """Conversations about the first problems, by kind."""
    critics: tuple[Criticised, ...]
    """Critiques and votes in those of critique self-play, and the judge on the same pairs."""
    cost: dict[str, TokenCost]
    """Costs by part: answers, judged pairs, every kind of conversation, the critics' pairs."""
    figures: dict[str, Figure]
    advice: tuple[Advice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Screener:
    """Asks problems at temperature 0 and at that of training, and has pairs of answers judged."""

    direct: DirectSampler
    """At the temperature of training."""
    num_samples: int
    judge: Judge
    num_pairs: int
    """Problems of which a pair is judged, at most."""

    async def ask(
        self, sampler: SamplingClient, items: Sequence[PromptItem], begin: Begin = unseen
    ) -> tuple[Screened, ...]:
        """All answers, without judgements."""
        greedy = self.direct.at(0.0)
        progress = begin("answers", len(items) * (self.num_samples + 1), "answers")

        async def answered(direct: DirectSampler, index: int, item: PromptItem, number: int) -> Try:
            answer, logprobs = await direct.sample(sampler, index, item, number)
            progress.on_reply(answer.num_tokens)
            progress.on_group(answer)
            return Try(
                answer=answer,
                logprob=math.fsum(logprobs),
                has_answer=answer.vote is not None and is_readable(answer.text, direct.check),
                is_lenient=is_lenient(answer, item.answer),
            )

        async def ask(index: int, item: PromptItem) -> Screened:
            tries = [answered(self.direct, index, item, number) for number in range(self.num_samples)]
            first, *others = await gather_or_cancel([answered(greedy, index, item, 0), *tries])
            return Screened(question=item.question, answer=item.answer, greedy=first, tries_N=tuple(others))

        return tuple(await gather_or_cancel(ask(index, item) for index, item in enumerate(items)))

    async def have_judged(
        self, problems_P: Sequence[Screened], seed: int, begin: Begin = unseen
    ) -> tuple[Screened, ...]:
        """The problems with a pair of answers judged in both orders, where there are two that differ."""
        pairs = {place: pair for place, each in enumerate(problems_P) if (pair := pair_of(each)) is not None}
        chosen = dict(list(pairs.items())[: self.num_pairs])
        progress = begin("judged pairs", len(chosen), "pairs")

        async def judge(place: int, first: int, second: int) -> Judged:
            problem = problems_P[place]
            texts = {number: problem.tries_N[number].answer.text for number in (first, second)}
            one, other = await _both_ways(
                self.judge, problem.question, texts, derive_seed(seed, "judge", place)
            )
            progress.on_group((one, other))
            return Judged(first=first, second=second, both=(one, other))

        judged = await gather_or_cancel(judge(place, *pair) for place, pair in chosen.items())
        by_place = dict(zip(chosen, judged, strict=True))
        return tuple(replace(each, judged=by_place.get(place)) for place, each in enumerate(problems_P))

    async def have_scored(
        self, problems_P: Sequence[Screened], reward: SolutionReward, seed: int, begin: Begin = unseen
    ) -> tuple[Screened, ...]:
        """The problems with the judge's scores of all answers that were given, by the criteria of ``rubric``."""
        progress = begin("scored answers", len(problems_P), "problems")

        async def score(place: int, problem: Screened) -> Screened:
            tries = [problem.tries_N[number] for number in problem.given]
            group = solutions_of(tries, derive_seed(seed, "rubric", place))
            failure, scores = None, [(None,) for _ in tries]
            try:
                scored = await reward.ask(group, problem.question, Models(judge=self.judge))
                scores = [tuple(each) for each in (scored.rubric or {}).values()]
            except FAILURES as error:
                failure = reason_of(error)
            progress.on_group(scores)
            return replace(problem, rubric=dict(zip(problem.given, scores, strict=True)), failure=failure)

        return tuple(await gather_or_cancel(score(place, each) for place, each in enumerate(problems_P)))


async def _both_ways(
    judge: Judge, question: str, texts: Mapping[int, str], seed: int
) -> Sequence[Comparison]:
    """Two solutions compared in both orders; a judge that fails makes failed comparisons."""
    try:
        return await judge.tournament(question, texts, _BOTH_WAYS, seed)
    except FAILURES as error:
        one, other = texts
        return failed_both_ways(one, other, error)


def solutions_of(tries_N: Sequence[Try], seed: int) -> Solutions:
    """The answers to a problem as rewards see them."""
    texts = [one.answer.text for one in tries_N]
    return Solutions(
        final_G=texts,
        first_G=texts,
        finished_G=[one.answer.finished for one in tries_N],
        # the mean over tokens stands for them: no reward of solutions looks at single tokens
        logprobs_G_T=[[one.logprob / one.answer.num_tokens] for one in tries_N],
        graded_G=[float(one.answer.right) for one in tries_N],
        seed=seed,
    )


def pair_of(problem: Screened) -> tuple[int, int] | None:
    """The first right and the first wrong answer, or, where none is known, the first two that differ, if there are."""
    have = [(number, each.answer) for number, each in enumerate(problem.tries_N) if each.has_answer]
    if problem.answer is None:
        others = [number for number, answer in have if answer.vote != have[0][1].vote]
        return (have[0][0], others[0]) if others else None
    right = [number for number, answer in have if answer.right]
    wrong = [number for number, answer in have if not answer.right]
    return (right[0], wrong[0]) if right and wrong else None


def is_readable(text: str, check: AnswerCheck) -> bool:
    """Whether an answer stands out of a finished reply: it is marked, a number or a letter, or the reply is short."""
    if check.name == "choice" or marked_answer(text) is not None:
        return check.vote(text) is not None
    answer = extract_answer(text)
    return answer is not None and (answer != text.strip() or len(text.split()) <= _SHORT_REPLY)


def verdict_of(text: str) -> bool | None:
    """Whether a critique ends by calling what it criticises right; ``None`` if it ends in no verdict."""
    found = _VERDICT.search(text.rstrip()[-_LONGEST_ENDING:])
    return None if found is None else found["right"] is not None


def records_of(outcomes: Sequence[GroupOutcome]) -> tuple[ConversationRecord, ...]:
    """The conversations that were held to their end."""
    return tuple(
        ConversationRecord.model_validate(record_of(outcome.builder))
        for outcome in outcomes
        if outcome.group is not None
    )


def criticised(records: Sequence[ConversationRecord]) -> tuple[Criticised, ...]:
    """Those with graded first solutions."""
    return tuple(_read(each, each.correct_initial) for each in records if each.correct_initial is not None)


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

    async def compare(own: Judge, place: int, right: int, wrong: int) -> Sequence[Comparison]:
        talk, pair_seed = talks[place], derive_seed(seed, "critics' pairs", place, right, wrong)
        texts = {agent_id: talk.solutions[agent_id] for agent_id in (right, wrong)}
        both = await _both_ways(own, talk.question, texts, pair_seed)
        progress.on_group(both)
        return both

    async def judged(place: int, talk: Criticised) -> Criticised:
        pairs = [pair for at, pair in chosen if at == place]
        if not pairs:
            return talk
        try:
            own = await judge.for_question(talk.question, derive_seed(seed, "critics' pairs", place))
        except FAILURES as error:
            found = [failed_both_ways(*pair, error) for pair in pairs]
        else:
            found = await gather_or_cancel(compare(own, place, *pair) for pair in pairs)
        return replace(talk, judged=tuple(each for both in found for each in both))

    return tuple(await gather_or_cancel(judged(place, talk) for place, talk in enumerate(talks)))


def write_screening(path: Path, screening: Screening) -> None:
    """Write all of it as JSON."""
    write_json(path, {"format": FORMAT, **asdict(screening)})
