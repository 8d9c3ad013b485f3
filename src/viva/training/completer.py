"""The policy as environments see it: one completer per seat, each call with its own derived seed."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import tinker
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs

from viva.judging.policy import SamplingClient, sample
from viva.training.seeds import derive_seed

__all__ = ["Policy", "PromptTooLongError", "SeededCompleter"]


class PromptTooLongError(ValueError):
    """A prompt leaves no room for a reply."""


@dataclass(kw_only=True)
class SeededCompleter(TokenCompleter):
    """One seat's policy. Call ``i`` draws with a seed that depends on ``seed`` and ``i`` alone."""

    sampler: SamplingClient
    seed: int
    max_tokens: int
    temperature: float = 1.0
    context_window: int | None = None
    """Tokens the model can hold; replies are cut so that prompt and reply fit."""
    timeout_s: float | None = None
    """Longest time one call may take. Results then depend on the clock, so it is off by default."""
    on_reply: Callable[[int], None] | None = None
    """Is told how many tokens each reply has."""
    num_calls: int = field(default=0, init=False)

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """Sample one reply.

        Raises:
            PromptTooLongError: If the prompt leaves no room for a reply.
            TimeoutError: If the call took longer than ``timeout_s``.
        """
        params = tinker.SamplingParams(
            stop=stop,
            max_tokens=self._room(model_input.length, max_tokens),
            temperature=self.temperature,
            seed=derive_seed(self.seed, self.num_calls),
        )
        self.num_calls += 1
        async with asyncio.timeout(self.timeout_s):
            response = await sample(self.sampler, model_input, params)
        sequence = response.sequences[0]
        if sequence.logprobs is None:
            raise ValueError(
                "the sampler returned no logprobs; training needs the logprobs of what was sampled"
            )
        if self.on_reply is not None:
            self.on_reply(len(sequence.tokens))
        return TokensWithLogprobs(
            tokens=sequence.tokens, maybe_logprobs=sequence.logprobs, stop_reason=sequence.stop_reason
        )

    def _room(self, prompt_length: int, max_tokens: int | None) -> int:
        room = self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens)
        if self.context_window is None:
            return room
        room = min(room, self.context_window - prompt_length)
        if room < 1:
            raise PromptTooLongError(
                f"a prompt of {prompt_length} tokens leaves no room for a reply: the model holds "
                f"{self.context_window}. Use fewer rounds or agents, shorter prompts, a smaller max_tokens, "
                "or a model with a longer context."
            )
        return room


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A sampler with its settings, from which every seat of every group takes its own completer."""

    sampler: SamplingClient
    seed: int
    """Derived from the run's seed and the step."""
    max_tokens: int
    temperature: float = 1.0
    context_window: int | None = None
    timeout_s: float | None = None
    on_reply: Callable[[int], None] | None = None

    def seat(self, *, group: int, attempt: int, seat: int) -> SeededCompleter:
        """The completer of one seat in one attempt at one group."""
        return SeededCompleter(
            sampler=self.sampler,
            seed=derive_seed(self.seed, group, attempt, seat),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            context_window=self.context_window,
            timeout_s=self.timeout_s,
            on_reply=self.on_reply,
        )
