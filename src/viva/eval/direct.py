"""Direct accuracy: the bare question, one sampled reply, right or wrong.

This is what training is for: what the policy could only answer after a conversation, it should answer at once.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tinker_cookbook.renderers.base import Renderer

from viva.conversation.prompts import direct_messages
from viva.conversation.rendering import build_prompt, read_reply
from viva.eval.answers import is_correct
from viva.judging.policy import SamplingClient
from viva.rl.completer import PromptTooLongError, SeededCompleter
from viva.rl.prompts import PromptItem
from viva.rl.seeds import derive_seed

__all__ = ["DirectEvaluator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    is_right: bool
    is_finished: bool
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectEvaluator:
    """Accuracy on the questions with a known answer; the denominator is always all of them.

    A reply that is cut off, unreadable or not given (the question does not fit) is wrong. Every question keeps its
    seed from step to step, so changes come from the weights.
    """

    items: Sequence[PromptItem]
    renderer: Renderer
    seed: int
    max_tokens: int
    temperature: float = 1.0
    context_window: int | None = None
    grader: Callable[[str, str], bool] = is_correct

    def __post_init__(self) -> None:
        """Reject a test set that cannot be graded."""
        missing = sum(item.answer is None for item in self.items)
        if not self.items or missing:
            raise ValueError(
                f"direct accuracy needs questions with answers; got {len(self.items)}, {missing} without answer"
            )

    async def __call__(self, sampler: SamplingClient, step: int) -> Mapping[str, float]:
        """Ask all questions at once; metrics ``test/direct_*``."""
        del step  # seeds are the same at every step
        replies = await asyncio.gather(
            *(self._ask(sampler, index, item) for index, item in enumerate(self.items))
        )
        count = len(replies)
        accuracy = sum(reply.is_right for reply in replies) / count
        return {
            "test/direct_accuracy": accuracy,
            "test/direct_accuracy_stderr": math.sqrt(accuracy * (1 - accuracy) / count),
            "test/direct_questions": count,
            "test/direct_finish_rate": sum(reply.is_finished for reply in replies) / count,
            "test/direct_reply_tokens": sum(reply.num_tokens for reply in replies) / count,
        }

    async def _ask(self, sampler: SamplingClient, index: int, item: PromptItem) -> _Reply:
        completer = SeededCompleter(
            sampler=sampler,
            seed=derive_seed(self.seed, "direct", index),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            context_window=self.context_window,
        )
        prompt = build_prompt(self.renderer, direct_messages(item.question))
        try:
            reply = await completer(prompt, self.renderer.get_stop_sequences())
        except PromptTooLongError:
            return _Reply(is_right=False, is_finished=False, num_tokens=0)
        text, is_clean = read_reply(self.renderer, reply.tokens)
        is_finished = is_clean and reply.stop_reason == "stop"
        is_right = is_finished and self.grader(text, item.answer or "")
        return _Reply(is_right=is_right, is_finished=is_finished, num_tokens=len(reply.tokens))
