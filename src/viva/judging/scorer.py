"""A model says how probable one reply is to a question, alone and beside another reply; it samples nothing.

Both replies stand in one prompt as two students' answers, as in the prompts of peer prediction (arXiv 2601.20299),
in words of our own and without its worked examples.

Legend: ``_G`` replies to one question, ``_T`` tokens of a reply.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import tinker
from tinker_cookbook.renderers.base import Message, Renderer

from viva.conversation.coordinator import gather_or_cancel
from viva.conversation.guard import remembering
from viva.conversation.protocol import quote
from viva.conversation.rendering import build_prompt, reply_tokens
from viva.judging.judge import PolicyRef, sample

Gains = dict[int, dict[int, float]]
"""By informant and target: how much more probable the first one's reply makes the second one's."""


class ScorerError(RuntimeError):
    """The engine returned no log-probabilities of a prompt."""


@dataclass(frozen=True, kw_only=True)
class ScorerOptions:
    """Options of the scorer of replies.

    Raises:
        ValueError: If the policy is none of those allowed, or is named beside another model.
    """

    policy: Literal["current", "initial"] = "initial"
    """The policy as it was at the start, which no reward can move, or the one being trained."""
    model: str | None = None
    """Another model, such as a smaller one without any fine-tuning; it stays as it is."""

    def __post_init__(self) -> None:
        if self.policy not in ("current", "initial"):
            raise ValueError(f"scorer policy must be 'current' or 'initial'; got {self.policy!r}")
        if self.model is not None and self.policy != "initial":
            raise ValueError(
                f"scorer model {self.model!r} is never trained, so policy must be 'initial'; got {self.policy!r}"
            )


def scorer_messages(question: str, informant: str | None) -> list[Message]:
    """The prompt behind which a reply is scored: the question, and another reply to it unless there is none."""
    asked = f"Question:\n{quote(question)}\n\n"
    if informant is None:
        text = f"A student answers a question.\n\n{asked}Write the student's answer."
    else:
        text = (
            "Two students answer a question, each without seeing the other's answer.\n\n"
            f"{asked}The first student's answer:\n{quote(informant)}\n\nWrite the second student's answer."
        )
    return [Message(role="user", content=text)]


class Scorer:
    """Scores replies with the model that a `PolicyRef` holds, looked up at every request."""

    def __init__(self, policy: PolicyRef, renderer: Renderer) -> None:
        self.policy = policy
        self.renderer = renderer

    async def log_probability(self, question: str, reply: str, informant: str | None = None) -> float:
        """The mean log-probability of a reply's tokens, in nats, behind the question and perhaps another reply.

        Raises:
            ScorerError: If the engine returns no log-probabilities of a prompt.
            ValueError: If the reply has no token.
            TimeoutError: If it took longer than the policy's ``timeout_s``.
        """
        tokens_T = reply_tokens(self.renderer, reply)
        if not tokens_T:
            raise ValueError("a reply without a token has no probability")
        before = build_prompt(self.renderer, scorer_messages(question, informant))
        prompt = tinker.ModelInput.from_ints([*before.to_ints(), *tokens_T])
        params = tinker.SamplingParams(max_tokens=1, temperature=1.0, seed=0)
        async with asyncio.timeout(self.policy.timeout_s):
            response = await sample(
                self.policy.current(), prompt, params, role="scorer", include_prompt_logprobs=True
            )
        found = (response.prompt_logprobs or [])[-len(tokens_T) :]
        logprobs_T = [logprob for logprob in found if logprob is not None]
        if len(logprobs_T) < len(tokens_T) or not all(map(math.isfinite, logprobs_T)):
            raise ScorerError(
                "the engine returned no usable log-probabilities of a prompt's tokens, which a scorer needs; use an "
                "engine that returns them (the local one does), or a reward without a scorer"
            )
        return math.fsum(logprobs_T) / len(logprobs_T)

    async def gains(self, question: str, replies_G: Mapping[int, str]) -> Gains:
        """The help of every reply in predicting every other one, in nats per token of the other.

        Each pair of texts is asked for once. A reply without words predicts nothing and is not predicted: its gains
        are 0. Raises as `log_probability`.
        """
        pairs = list(itertools.permutations(replies_G, 2))
        words = {key: text for key, text in replies_G.items() if text.strip()}
        spoken = [(words[i], words[j]) for i, j in pairs if i in words and j in words]
        wanted: Sequence[tuple[str | None, str]] = list(
            dict.fromkeys([*((None, target) for _, target in spoken), *spoken])
        )
        with remembering({}):
            found = await gather_or_cancel(
                self.log_probability(question, target, informant) for informant, target in wanted
            )
        known = dict(zip(wanted, found, strict=True))
        gains: Gains = {informant: {} for informant in replies_G}
        for i, j in pairs:
            is_spoken = i in words and j in words
            gains[i][j] = known[words[i], words[j]] - known[None, words[j]] if is_spoken else 0.0
        return gains
