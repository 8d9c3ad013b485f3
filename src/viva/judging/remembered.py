"""A judge that is asked once about the same words: several rewards of one conversation have much the same compared."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tinker_cookbook.renderers.base import Message

from viva.judging.comparison import Comparison, Judge


class RememberingJudge(Judge):
    """Another judge, whose comparisons are kept for as long as this one is.

    All judges of this package compare at temperature 0, so that nothing but the words decides.
    """

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.answers_first = judge.answers_first
        self.own_answer = judge.own_answer
        self._compared: dict[tuple[str, str, str], Comparison] = {}
        self._by_question: dict[str, RememberingJudge] = {}

    async def compare(
        self, question: str, solutions: Mapping[int, str], first: int, second: int, seed: int
    ) -> Comparison:
        """See `Judge.compare`."""
        words = (question, solutions[first], solutions[second])
        if words not in self._compared:
            self._compared[words] = await self.judge.compare(question, solutions, first, second, seed)
        return replace(self._compared[words], first=first, second=second)

    async def answer(self, messages: Sequence[Message], seed: int) -> str:
        """See `Judge.answer`."""
        return await self.judge.answer(messages, seed)

    async def score(self, question: str, answer: str, criterion: str, seed: int) -> float | None:
        """See `Judge.score`."""
        return await self.judge.score(question, answer, criterion, seed)

    async def for_question(self, question: str, seed: int) -> Judge:
        """See `Judge.for_question`; an own answer is asked for once."""
        if not self.answers_first:
            return self
        if question not in self._by_question:
            self._by_question[question] = RememberingJudge(await self.judge.for_question(question, seed))
        return self._by_question[question]

    def described(self) -> dict[str, str]:
        """See `Judge.described`."""
        return self.judge.described()
