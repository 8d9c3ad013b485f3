"""The interface of judges: the policy, another model, or one behind an endpoint."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping

from viva.conversation.coordinator import gather_or_cancel
from viva.conversation.guard import remembering
from viva.judging.comparison import Comparison, TournamentPattern, pairs


class JudgeError(RuntimeError):
    """A judge gave nothing that a verdict could be read from."""


class Judge(ABC):
    """Compares solutions of one question, two at a time."""

    @abstractmethod
    async def compare(
        self, question: str, solutions: Mapping[int, str], first: int, second: int, seed: int
    ) -> Comparison:
        """Compare the solutions of ``first``, shown as A, and ``second``.

        The same words tie without being judged (`viva.judging.comparison.same_words`). A reply that cannot be read is
        a comparison whose outcome is ``INVALID``; a judge that fails raises, so that no score is made up.

        Args:
            question: The question.
            solutions: By the keys that the comparison is to have.
            first: Key of the one shown first.
            second: Key of the other.
            seed: Of whatever is sampled for it.
        """

    @abstractmethod
    def described(self) -> dict[str, str]:
        """``system_prompt``, and ``prefill`` that is put before the judge's reply, for the record."""

    async def tournament(
        self, question: str, solutions: Mapping[int, str], pattern: TournamentPattern, seed: int
    ) -> list[Comparison]:
        """All comparisons of a pattern, concurrently, in the order of the pairs.

        With ``ALL_PAIRS_ONE_WAY``, the seed decides who of a pair is shown first.

        Raises:
            Exception: As `compare`; the other comparisons are cancelled then.
        """
        rng = random.Random(seed)
        orders = pairs(sorted(solutions), pattern)
        if pattern is TournamentPattern.ALL_PAIRS_ONE_WAY:
            orders = [order if rng.random() < 0.5 else (order[1], order[0]) for order in orders]
        with remembering({}):
            return await gather_or_cancel(
                self.compare(question, solutions, first, second, rng.getrandbits(31))
                for first, second in orders
            )
