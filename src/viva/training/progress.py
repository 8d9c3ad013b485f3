"""How far the rollouts of a step, or a part of an evaluation, are: counted by callbacks, which change nothing."""

import time
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Begin", "StepProgress", "unseen"]


class StepProgress:
    """Conversations and tokens of one step so far; or questions, and what else an evaluation consists of.

    Args:
        num_groups: Conversations of the step.
        expected_tokens: What the step is likely to sample, judging by those before; ``None`` if nothing is known.
        clock: Seconds.
        noun: What is counted.
    """

    def __init__(
        self,
        *,
        num_groups: int,
        expected_tokens: float | None,
        clock: Callable[[], float] = time.monotonic,
        noun: str = "conversations",
    ) -> None:
        self.num_groups = num_groups
        self.noun = noun
        self.num_done = 0
        """Conversations that ended."""
        self.num_tokens = 0
        """Sampled, of all conversations: those that go on included."""
        self._expected_tokens = expected_tokens
        self._clock = clock
        self._started = clock()

    def on_reply(self, num_tokens: int) -> None:
        """Count a reply."""
        self.num_tokens += num_tokens

    def on_group(self, _: object) -> None:
        """Count a conversation."""
        self.num_done += 1

    @property
    def is_done(self) -> bool:
        """Whether all have ended."""
        return self.num_done >= self.num_groups

    @property
    def share(self) -> float:
        """Of the step's rollouts, how much is done, from 0 to 1.

        Conversations run at the same time and end almost together, so tokens tell more, once it is known how many there
        will be.
        """
        ended = self.num_done / self.num_groups if self.num_groups else 1.0
        if not self._expected_tokens or ended == 1.0:
            return ended
        return max(ended, min(0.99, self.num_tokens / self._expected_tokens))

    @property
    def tokens_per_second(self) -> float:
        """Mean since the step began."""
        seconds = self._clock() - self._started
        return self.num_tokens / seconds if seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Until the last conversation ends at the pace so far; ``None`` as long as nothing is known."""
        share = self.share
        return (self._clock() - self._started) * (1 - share) / share if share > 0 else None


Begin: TypeAlias = Callable[[str, int, str], StepProgress]
"""Begins a part of an evaluation: its title, how many of what it consists of; counted with what it returns."""


def unseen(title: str, count: int, noun: str) -> StepProgress:
    """A `Begin` that shows nothing."""
    del title
    return StepProgress(num_groups=count, expected_tokens=None, noun=noun)
