"""Answers of two policies scored by a rubric, see `viva.judging.rubric`.

Legend: ``_P`` prompts, ``_N`` answers to one prompt, ``_C`` criteria.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from viva.conversation.coordinator import gather_or_cancel
from viva.eval.estimates import Terms, term_of
from viva.eval.judged import FAILURES, reason_of
from viva.eval.records import Asked
from viva.judging.comparison import Judge
from viva.judging.records import Criterion
from viva.judging.rubric import weighted_mean
from viva.training.console import Begin, unseen
from viva.training.data import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class CriterionScore:
    """An answer's score by a criterion."""

    value: float | None
    """From 0 to 1; ``None`` if the judge's reply cannot be read, or it failed."""
    failure: str | None = None
    """Reason why the judge gave no reply."""


Scores = list[list[list[CriterionScore]]]
"""``[prompt][answer][criterion]``."""


async def score_answers(
    judge: Judge,
    criteria_C: Sequence[Criterion],
    asked_P: Sequence[Asked],
    seed: int,
    begin: Begin = unseen,
) -> Scores:
    """Scores of all answers by every criterion; one that fails has its reason in the place of a score."""
    progress = begin("rubric", sum(len(each.answers) for each in asked_P), "answers")

    async def ask(judge: Judge, asked: Asked, place: int, number: int, criterion: int) -> CriterionScore:
        text, wanted = asked.answers[number].text, criteria_C[criterion].text
        own_seed = derive_seed(seed, "rubric", place, number, criterion)
        try:
            return CriterionScore(value=await judge.score(asked.question, text, wanted, own_seed))
        except FAILURES as error:
            return CriterionScore(value=None, failure=reason_of(error))

    async def of_answer(judge: Judge, asked: Asked, place: int, number: int) -> list[CriterionScore]:
        scores = await gather_or_cancel(
            ask(judge, asked, place, number, criterion) for criterion in range(len(criteria_C))
        )
        progress.on_group(scores)
        return scores

    async def of_prompt(asked: Asked, place: int) -> list[list[CriterionScore]]:
        try:
            ready = await judge.for_question(asked.question, derive_seed(seed, "own answer", place))
        except FAILURES as error:
            failed = [CriterionScore(value=None, failure=reason_of(error))] * len(criteria_C)
            for _ in asked.answers:
                progress.on_group(failed)
            return [failed for _ in asked.answers]
        return await gather_or_cancel(
            of_answer(ready, asked, place, number) for number in range(len(asked.answers))
        )

    return await gather_or_cancel(of_prompt(asked, place) for place, asked in enumerate(asked_P))


def rubric_figures(scores_P_N_C: Scores, criteria_C: Sequence[Criterion]) -> dict[str, Terms]:
    """Figures of one policy's answers.

    - ``score``: weighted mean of the scores of an answer's criteria, ``sum_c w_c s_c / sum_c w_c``, over those with a
      readable score; the mean over answers that have any.
    - ``criterion_1``, ``criterion_2``, ...: mean score by one criterion.
    - ``invalid_rate``: of all scores asked for, those that cannot be read or failed.
    """
    weights_C = [each.weight for each in criteria_C]
    figures: dict[str, Terms] = {
        "score": [
            term_of(weighted_mean([score.value for score in each], weights_C) for each in answers)
            for answers in scores_P_N_C
        ]
    }
    for place in range(len(criteria_C)):
        figures[f"criterion_{place + 1}"] = [
            term_of(each[place].value for each in answers) for answers in scores_P_N_C
        ]
    figures["invalid_rate"] = [
        term_of(float(score.value is None) for each in answers for score in each) for answers in scores_P_N_C
    ]
    return figures
