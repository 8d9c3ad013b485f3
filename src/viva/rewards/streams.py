"""Advantages of tokens: rewards on token spans, with one baseline per reward stream and round, or rewards of seats.

A span is a run of sampled tokens that earned one reward of one stream (``r_sol``, ``r_diag``, ``r_meta``). With ``S``
the spans of one stream in one round of one group, every token of span ``s`` gets

    A_s = w_stream * (r_s - mean_{u in S} r_u)

and every token outside all spans gets exactly 0, because it is left out and not because its reward is 0. The unit of
the mean is the span: long spans do not set the baseline of short ones, and units of different streams never mix.

What this optimises. The mean contains the span's own reward. With ``n = |S|`` spans,

    E[sum_s A_s grad log pi(s)] = w sum_s ( (1 - 1/n) E[r_s grad log pi(s)] - 1/n sum_{u != s} E[r_u grad log pi(s)] )

that is, exactly the gradient of what each span earns above its group's mean. Where the tokens of one span do not move
the rewards of the others, the second sum vanishes and what remains is the plain policy gradient of ``w sum_s E[r_s]``,
smaller by the factor ``1 - 1/n``. Where they do (strengths of one Bradley-Terry fit sum to zero; a critique changes a
revision's score), the second sum is the interaction: being better than the others pays, and so does making the others
worse. A lone span (``n = 1``) has advantage 0: alone, it says nothing about better or worse.

Without credit on spans, a seat's tokens get its reward minus the mean of its group (`group_advantages`): the advantage
of GRPO without the division by the group's standard deviation (Shao et al., 2024, arXiv 2402.03300; Liu et al., 2025,
arXiv 2503.20783, show that the division biases towards very easy and very hard prompts).

Legend: ``_P`` groups of a batch, ``_G`` members of a group (seats), ``_K`` transitions of a seat, ``_T`` action tokens.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable


def group_advantages(rewards_P_G: Sequence[Sequence[float]]) -> list[list[float]]:
    """Reward minus the mean reward of the group, for every member of every group.

    A group whose rewards are all equal gets exact zeros, so that callers see that it carries no signal.

    Args:
        rewards_P_G: Total reward of every member, group by group. Groups may differ in size.

    Returns:
        Advantages in the same shape. They sum to zero within each group, up to rounding.

    Raises:
        ValueError: If a reward is not a finite number.
    """
    return [_centred(rewards_G, index) for index, rewards_G in enumerate(rewards_P_G)]


def _centred(rewards_G: Sequence[float], index: int) -> list[float]:
    if not all(math.isfinite(reward) for reward in rewards_G):
        raise ValueError(
            f"rewards of group {index} must be finite numbers; got {list(rewards_G)}. "
            "A reward that could not be computed must raise where it is computed."
        )
    if len(set(rewards_G)) <= 1:
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanCredit:
    """One reward on the sampled tokens ``[start, stop)`` of one transition."""

    seat: int
    """Index of the environment in its group."""
    transition: int
    """Index of the turn in the seat's trajectory."""
    start: int
    stop: int
    stream: str
    round_index: int
    """The round the tokens were sampled in. Together with the stream, it names the baseline."""
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCredit:
    """The earnings of one group's tokens."""

    spans: tuple[SpanCredit, ...]
    weights: Mapping[str, float]
    """Weight of each stream."""

    def __post_init__(self) -> None:
        """Reject credit that cannot be given.

        Raises:
            ValueError: A reward or weight that is no finite number, a span without tokens, a stream without weight,
                or spans that overlap.
        """
        for stream, weight in self.weights.items():
            if not math.isfinite(weight):
                raise ValueError(f"the weight of stream {stream!r} must be a finite number; got {weight}")
        for span in self.spans:
            self._check(span)
        order = sorted(self.spans, key=lambda span: (span.seat, span.transition, span.start))
        for one, other in pairwise(order):
            if (one.seat, one.transition) == (other.seat, other.transition) and other.start < one.stop:
                raise ValueError(f"a token earns at most one reward; {one} and {other} overlap")

    def _check(self, span: SpanCredit) -> None:
        if not math.isfinite(span.reward):
            raise ValueError(
                f"rewards must be finite numbers; got {span}. "
                "A reward that could not be computed must raise where it is computed."
            )
        if not 0 <= span.start < span.stop:
            raise ValueError(f"a span needs at least one token, 0 <= start < stop; got {span}. Leave it out.")
        if span.stream not in self.weights:
            known = ", ".join(sorted(self.weights)) or "none"
            raise ValueError(f"stream {span.stream!r} of {span} has no weight; streams with one: {known}")

    def streams(self) -> dict[tuple[str, int], list[SpanCredit]]:
        """The spans that share a baseline, by (stream, round)."""
        found: dict[tuple[str, int], list[SpanCredit]] = {}
        for span in self.spans:
            found.setdefault((span.stream, span.round_index), []).append(span)
        return found

    def advantages(self) -> Iterator[tuple[SpanCredit, float]]:
        """Every span and the advantage of its tokens; exact zeros where all rewards of a stream's round are equal."""
        for spans in self.streams().values():
            if len({span.reward for span in spans}) == 1:
                yield from ((span, 0.0) for span in spans)
                continue
            baseline = math.fsum(span.reward for span in spans) / len(spans)
            for span in spans:
                yield span, self.weights[span.stream] * (span.reward - baseline)


@runtime_checkable
class Crediting(Protocol):
    """A group builder whose groups can earn rewards on spans of tokens."""

    def credit(self) -> GroupCredit | None:
        """Credit of the last group's tokens; ``None`` if its rewards of seats count instead."""
        ...


def credit_of(builder: object) -> GroupCredit | None:
    """Credit of a builder's last group; ``None`` if it gives none."""
    return builder.credit() if isinstance(builder, Crediting) else None


def stream_advantages(
    credit: GroupCredit, num_tokens_G_K: Sequence[Sequence[int]]
) -> list[list[list[float]] | None]:
    """Advantages of all tokens of a group.

    Args:
        credit: The spans and their rewards.
        num_tokens_G_K: Number of sampled tokens, per seat and transition.

    Returns:
        Per seat ``[transition][token]``, or ``None`` for a seat in which nothing carries a signal.

    Raises:
        ValueError: If a span lies outside the sampled tokens.
    """
    advantages_G_K_T = [[[0.0] * count for count in num_tokens_K] for num_tokens_K in num_tokens_G_K]
    for span, advantage in credit.advantages():
        if not 0 <= span.seat < len(num_tokens_G_K):
            raise ValueError(f"{span} must lie in one of {len(num_tokens_G_K)} seats")
        num_tokens_K = num_tokens_G_K[span.seat]
        if not (0 <= span.transition < len(num_tokens_K) and span.stop <= num_tokens_K[span.transition]):
            raise ValueError(
                f"{span} must lie in the seat's sampled tokens, {list(num_tokens_K)} per transition"
            )
        own_T = advantages_G_K_T[span.seat][span.transition]
        own_T[span.start : span.stop] = [advantage] * (span.stop - span.start)
    return [
        advantages_K_T if any(value for advantages_T in advantages_K_T for value in advantages_T) else None
        for advantages_K_T in advantages_G_K_T
    ]
