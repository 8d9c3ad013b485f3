"""Sampling of replies: their settings, and the policy from which every seat takes a seeded completer of its own."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import tinker
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs

from viva.judging.judge import SamplingClient, sample
from viva.sdk import answers_together
from viva.training.data import derive_seed


class PromptTooLongError(ValueError):
    """A prompt leaves no room for a reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of replies, the same in training and in evaluation."""

    seed: int = 0
    max_tokens: int = 512
    temperature: float = 1.0
    context_window: int | None = None
    """Tokens the model can hold; replies are cut so that prompt and reply fit."""
    timeout_s: float | None = None
    """Time limit of one call. Results then depend on the clock, so it is off by default."""
    max_retries: int = 1
    """Further attempts at a group that failed."""

    def seeded(self, *place: str | int) -> "Sampling":
        """The same with the seed of a place."""
        return replace(self, seed=derive_seed(self.seed, *place))


class Team:
    """Sampling clients of all policies of a run, by member; as a client itself it is that of the main one.

    A member has a pool of clients that may speak for it: several for a league of past selves.
    """

    def __init__(self, main: str, pools: Mapping[str, Sequence[SamplingClient]]) -> None:
        self._pools = pools
        self.answers_together = all(answers_together(each) for pool in pools.values() for each in pool)
        # the method itself: judges look at its signature for what the client can return
        self.sample = pools[main][-1].sample

    def member(self, name: str, draw: int = -1) -> SamplingClient:
        """The client of a member; of a league the one that a random number draws, by default the newest."""
        pool = self._pools[name]
        return pool[-1 if draw < 0 else draw % len(pool)]


def member_of(sampler: SamplingClient, name: str, draw: int = -1) -> SamplingClient:
    """The client of a member, see `Team.member`.

    Raises:
        TypeError: If the client is that of a single policy.
    """
    if not isinstance(sampler, Team):
        raise TypeError(f"{name!r} is a member of a run with several policies; got a single sampling client")
    return sampler.member(name, draw)


@dataclass(kw_only=True)
class SeededCompleter(TokenCompleter):
    """One seat's policy. Call ``i`` draws with a seed that depends on the sampling's and ``i`` alone."""

    sampler: SamplingClient
    sampling: Sampling
    on_reply: Callable[[int], None] | None = None
    """Called with the number of tokens of each reply."""
    group_seed: int = 0
    """Draw of the group and attempt: all seats of a conversation meet the same past self."""
    speaker: str | None = None
    """Member of a `Team` that replies next; ``None``: the main policy."""
    num_calls: int = field(default=0, init=False)

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """Sample one reply.

        Raises:
            PromptTooLongError: If the prompt leaves no room for a reply.
            TimeoutError: If the call took longer than ``timeout_s``.
        """
        speaking = self.sampler
        if self.speaker is not None:
            speaking = member_of(self.sampler, self.speaker, self.group_seed)
        params = tinker.SamplingParams(
            stop=stop,
            max_tokens=self._room(model_input.length, max_tokens),
            temperature=self.sampling.temperature,
            seed=derive_seed(self.sampling.seed, self.num_calls),
        )
        self.num_calls += 1
        async with asyncio.timeout(self.sampling.timeout_s):
            response = await sample(speaking, model_input, params)
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
        room, window = self.sampling.max_tokens, self.sampling.context_window
        room = room if max_tokens is None else min(room, max_tokens)
        if window is None:
            return room
        room = min(room, window - prompt_length)
        if room < 1:
            raise PromptTooLongError(
                f"a prompt of {prompt_length} tokens leaves no room for a reply: the model holds "
                f"{window}. Use fewer rounds or agents, shorter prompts, a smaller max_tokens, "
                "or a model with a longer context."
            )
        return room


@dataclass(kw_only=True)
class SeatSampler:
    """A sampler from which every seat of every group takes its own completer; its seed is that of run and step."""

    sampler: SamplingClient
    sampling: Sampling
    on_reply: Callable[[int], None] | None = None

    def seat(self, *, group: int, attempt: int, seat: int) -> SeededCompleter:
        """The completer of one seat in one attempt at one group."""
        return SeededCompleter(
            sampler=self.sampler,
            sampling=self.sampling.seeded(group, attempt, seat),
            on_reply=self.on_reply,
            group_seed=derive_seed(self.sampling.seed, "member", group, attempt),
        )
