"""A policy so small that every completion can be enumerated: expectations and gradients are exact.

The policy is a table of logits for each position and each of the last `memory` tokens. A hint adds to the logits:
towards the answer on the content positions, and towards a style token on the positions that no reward looks at.

Legend: ``_Y`` all completions, ``_T`` tokens, ``_D`` parameters of one position (rows of the table times symbols).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from viva.experts.estimation import Estimate
from viva.experts.samples import Sample


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """All completions of `length` tokens, and logits of shape [length, symbols ** memory, symbols]."""

    logits: np.ndarray
    memory: int

    @property
    def num_symbols(self) -> int:
        return self.logits.shape[2]

    @cached_property
    def completions_Y_T(self) -> np.ndarray:
        length = self.logits.shape[0]
        return np.stack(
            np.unravel_index(np.arange(self.num_symbols**length), (self.num_symbols,) * length), 1
        )

    @cached_property
    def rows_Y_T(self) -> np.ndarray:
        """Row of the table at each position: the last `memory` tokens as a number (missing ones are 0)."""
        completions_Y_T = self.completions_Y_T
        rows_Y_T = np.zeros_like(completions_Y_T)
        for lag in range(1, self.memory + 1):
            rows_Y_T[:, lag:] += completions_Y_T[:, :-lag] * self.num_symbols ** (lag - 1)
        return rows_Y_T

    @cached_property
    def log_table(self) -> np.ndarray:
        top = self.logits.max(axis=2, keepdims=True)
        return self.logits - top - np.log(np.exp(self.logits - top).sum(axis=2, keepdims=True))

    @cached_property
    def logprobs_Y_T(self) -> np.ndarray:
        positions_T = np.arange(self.logits.shape[0])
        return self.log_table[positions_T, self.rows_Y_T, self.completions_Y_T]

    @cached_property
    def probabilities_Y(self) -> np.ndarray:
        return np.exp(self.logprobs_Y_T.sum(axis=1))

    @cached_property
    def scores_Y_T_D(self) -> np.ndarray:
        """Gradient of each token's logprob with respect to its position's logits, flattened."""
        num_sequences, length = self.completions_Y_T.shape
        scores = np.zeros((num_sequences, length, *self.logits.shape[1:]))
        y, t = np.indices((num_sequences, length))
        scores[y, t, self.rows_Y_T] = -np.exp(self.log_table)[t, self.rows_Y_T]
        scores[y, t, self.rows_Y_T, self.completions_Y_T] += 1.0
        return scores.reshape(num_sequences, length, -1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A policy, its hinted self, and the reward of every completion."""

    policy: Table
    hinted: Table
    rewards_Y: np.ndarray
    num_content: int
    """Positions the reward looks at; those after it carry style."""

    @cached_property
    def true_gradient(self) -> np.ndarray:
        """Gradient of expected reward under the policy, [T, D]."""
        coefficients = self.policy.probabilities_Y * self.rewards_Y
        return np.einsum("y,ytd->td", coefficients, self.policy.scores_Y_T_D)

    def gap(self) -> float:
        """KL(hinted, policy) in nats."""
        difference_Y = (self.hinted.logprobs_Y_T - self.policy.logprobs_Y_T).sum(axis=1)
        return float(self.hinted.probabilities_Y @ difference_Y)

    @cached_property
    def samples(self) -> dict[str, list[Sample]]:
        """Every completion as a sample of ``iid`` and of ``hint``."""
        return {strategy: self._samples(strategy) for strategy in ("iid", "hint")}

    def _samples(self, strategy: str) -> list[Sample]:
        plain_Y_T, hinted_Y_T = self.policy.logprobs_Y_T, self.hinted.logprobs_Y_T
        is_iid = strategy == "iid"
        return [
            Sample(
                strategy=strategy,
                reward=float(reward),
                sampling_logprobs_T=plain_T if is_iid else hinted_T,
                old_logprobs_T=plain_T,
                on_policy=is_iid,
                context_logprobs={"hint": hinted_T} if is_iid else {},
            )
            for reward, plain_T, hinted_T in zip(self.rewards_Y, plain_Y_T, hinted_Y_T, strict=True)
        ]

    def drawn_from(self, strategy: str) -> np.ndarray:
        """Probability of every completion under a strategy."""
        return (self.policy if strategy == "iid" else self.hinted).probabilities_Y


def coefficients_T(sample: Sample, estimate: Estimate) -> np.ndarray:
    """Factor of each token's score in the first update: what the engine's ``importance_sampling`` multiplies."""
    return np.exp(sample.old_logprobs_T - estimate.logprobs_T) * estimate.advantages_T


def make_problem(
    seed: int,
    *,
    gap: float,
    style: bool,
    length: int = 7,
    num_content: int = 5,
    num_symbols: int = 3,
    memory: int = 1,
    num_right: int = 3,
) -> Problem:
    """A random policy, a random answer (right if `num_right` content tokens agree with it) and a hint of `gap` nats."""
    rng = np.random.default_rng([seed, length, num_symbols])
    logits = rng.normal(size=(length, num_symbols**memory, num_symbols))
    answer_T = rng.integers(num_symbols, size=length)
    direction = np.zeros_like(logits)
    direction[np.arange(length), :, answer_T] = 1.0
    if not style:
        direction[num_content:] = 0.0
    policy = Table(logits=logits, memory=memory)
    is_equal_Y_T = policy.completions_Y_T[:, :num_content] == answer_T[:num_content]
    rewards_Y = (is_equal_Y_T.sum(axis=1) >= num_right).astype(np.float64)

    def hinted_by(strength: float) -> Problem:
        hinted = Table(logits=logits + strength * direction, memory=memory)
        return Problem(policy=policy, hinted=hinted, rewards_Y=rewards_Y, num_content=num_content)

    low, high = 0.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if hinted_by(middle).gap() < gap else (low, middle)
    return hinted_by(low)
