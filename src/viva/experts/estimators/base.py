"""What an estimator is: it turns samples that were drawn under other contexts into the inputs of the engine's loss.

A completion ``y`` was drawn from ``q(. | x_sample)`` and is trained as a completion of ``x_train``. With
``l_t = log p_old(y_t | x_train, y_<t) - log q(y_t | x_sample, y_<t)``, the ratio between the policy being trained and
the sampler has two parts::

    p_theta / q  =  (p_theta / p_old on x_train)  *  (p_old on x_train / q)
                        staleness                        context gap, exp(l_t)

The loss ``importance_sampling`` multiplies each advantage by ``exp(p_theta - logprobs)``. An estimator chooses both
its inputs: ``logprobs`` (the anchor) and ``advantages``. Anchored at ``p_old`` the loss sees staleness only, so that
whatever it clips is staleness (Hilton et al. 2021, arXiv 2110.00641), and the context gap is a weight on the advantage.

Legend: ``_N`` samples of a batch, ``_T`` tokens of a completion. Logprobs are in nats.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "MAX_LOG_WEIGHT",
    "Baseline",
    "Estimator",
    "FloatArray",
    "Need",
    "Sample",
    "Weights",
    "capped_exp",
    "constant_weights",
    "context_gap",
    "total_context_gap",
]

FloatArray: TypeAlias = npt.NDArray[np.float64]

MAX_LOG_WEIGHT = 60.0
"""Weights end at ``exp(60)``: products with an advantage stay finite in the engine's float32."""


class Need(StrEnum):
    """What an estimator has to be given beside rewards and sampling logprobs."""

    OLD_LOGPROBS = "old_logprobs_T"
    """One scoring pass: the policy before the update, on the training context."""
    CONTEXT_LOGPROBS = "context_logprobs"
    """One scoring pass for every other context of the prompt."""


class Baseline(StrEnum):
    """What is subtracted from a reward."""

    STRATUM = "stratum"
    """The mean over the samples of the same prompt and strategy: the ordinary centring of a group."""
    PROMPT_UNION = "prompt_union"
    """The mean over the other samples of the prompt, whatever their strategy."""
    WEIGHTED = "weighted"
    """As ``PROMPT_UNION``, each sample counting by its weight: an estimate of the policy's own mean reward."""
    NONE = "none"
    """Nothing: the estimator makes its own advantages."""


def _frozen_array(name: str, values_T: FloatArray, length: int | None, *, finite: bool) -> FloatArray:
    array = np.array(values_T, dtype=np.float64)
    if array.ndim != 1 or (length is not None and len(array) != length):
        wanted = "one number per token" if length is None else f"{length} numbers, one per token"
        raise ValueError(f"{name} must be {wanted}; got an array of shape {array.shape}")
    is_wrong_T = ~np.isfinite(array) if finite else ~(array < np.inf)
    if is_wrong_T.any():
        place = int(is_wrong_T.argmax())
        allowed = "finite numbers" if finite else "numbers below infinity"
        raise ValueError(f"{name} must hold {allowed}; got {array[place]} for token {place}")
    array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One completion, with everything an estimator may look at. Arrays are copied and made read-only.

    Raises:
        ValueError: If the arrays do not have one number per token, or hold what no logprob or reward can be.
    """

    strategy: str
    """The search strategy that drew it."""
    prompt: Hashable = 0
    """Samples of the same prompt share a baseline and, for ``balance``, a mixture."""
    reward: float
    sampling_logprobs_T: FloatArray
    """``log q(y_t | x_sample)`` of the distribution drawn from, temperature and truncation included."""
    old_logprobs_T: FloatArray | None = None
    """``log p_old(y_t | x_train)``, from a scoring pass before the update."""
    on_policy: bool = False
    """Whether q is p_old on x_train: same context, temperature 1, no truncation. Then no scoring pass is needed."""
    context: str | None = None
    """Name of the realised sampling context within the prompt; by default the strategy's. Strategies whose context is
    itself sampled (feedback on an attempt) have one context per sample."""
    context_logprobs: Mapping[str, FloatArray] = field(default_factory=dict[str, FloatArray])
    """Per other context of the prompt ``log q_context(y_t)``; minus infinity for a token it cannot say."""
    advantages_T: FloatArray | None = None
    """Advantages that were made elsewhere (credit per span). They replace reward minus baseline."""
    checked_logprobs_T: FloatArray | None = None
    """As `sampling_logprobs_T`, but computed by the trainer: what the two are apart is an error of one of them."""
    finished: bool = True
    """Whether the completion ended by itself, not by the token limit."""

    def __post_init__(self) -> None:
        """Check and freeze."""
        if not np.isfinite(self.reward):
            raise ValueError(
                f"a sample of strategy {self.strategy!r} has reward {self.reward}; rewards are finite numbers"
            )
        sampling_T = _frozen_array("sampling_logprobs_T", self.sampling_logprobs_T, None, finite=True)
        object.__setattr__(self, "sampling_logprobs_T", sampling_T)
        length = len(sampling_T)
        optional = {
            "old_logprobs_T": self.old_logprobs_T,
            "advantages_T": self.advantages_T,
            "checked_logprobs_T": self.checked_logprobs_T,
        }
        for name, values_T in optional.items():
            if values_T is not None:
                object.__setattr__(self, name, _frozen_array(name, values_T, length, finite=True))
        frozen = {
            name: _frozen_array(f"context_logprobs[{name!r}]", values_T, length, finite=False)
            for name, values_T in sorted(self.context_logprobs.items())
        }
        object.__setattr__(self, "context_logprobs", frozen)

    def __len__(self) -> int:
        """Tokens."""
        return len(self.sampling_logprobs_T)

    @property
    def context_name(self) -> str:
        """The realised sampling context."""
        return self.strategy if self.context is None else self.context

    @property
    def old_T(self) -> FloatArray | None:
        """``log p_old(y_t | x_train)`` if it is known: scored, or sampled from just that distribution."""
        if self.old_logprobs_T is None and self.on_policy:
            return self.sampling_logprobs_T
        return self.old_logprobs_T


def context_gap(sample: Sample) -> FloatArray:
    """``l_t = log p_old(y_t | x_train) - log q(y_t | x_sample)``, shape [T].

    Raises:
        ValueError: If the sample was not scored under the training context.
    """
    if sample.old_T is None:
        raise ValueError(
            f"a sample of strategy {sample.strategy!r} has no old_logprobs_T, and it is not on_policy: "
            "score its completion under the training context before the update"
        )
    return sample.old_T - sample.sampling_logprobs_T


def total_context_gap(sample: Sample) -> float:
    """``log W = sum_t l_t``, the log of the sequence ratio. Raises as `context_gap`."""
    return float(context_gap(sample).sum())


def capped_exp(log_weights: FloatArray | float) -> FloatArray:
    """``exp``, cut at `MAX_LOG_WEIGHT`."""
    return np.exp(np.minimum(log_weights, MAX_LOG_WEIGHT))


def constant_weights(sample: Sample, weight: float) -> FloatArray:
    """The same weight for every token, shape [T]."""
    return np.full(len(sample), weight, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What an estimator says about one sample."""

    weights_T: FloatArray
    """Factors on the advantage, shape [T], never negative."""
    clipped_T: npt.NDArray[np.bool_]
    """Tokens whose weight was cut."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Weights and anchors for a batch of samples. Subclasses are one file each, with formula and source."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]]
    is_unbiased: ClassVar[bool]
    """Whether the expected first update is the gradient of expected reward under x_train, whatever the context gap,
    with any constant as baseline. Later updates on the same batch add staleness, which the token-wise loss corrects
    token by token only."""
    baselines: ClassVar[tuple[Baseline, ...]]
    """Those allowed; the first is the default."""
    combines_strategies: ClassVar[bool] = False
    """Whether the weights already make one estimate of all strategies, so that mixture weights must not be added."""
    anchors_at_sampling: ClassVar[bool] = False
    """Whether the loss gets the sampling logprobs instead of p_old's, and applies the context gap by itself."""

    def weights(self, samples_N: Sequence[Sample]) -> list[Weights]:
        """Weights of every sample, in order; by default 1. The samples have what the estimator `needs`."""
        return [
            Weights(weights_T=constant_weights(sample, 1.0), clipped_T=np.zeros(len(sample), dtype=np.bool_))
            for sample in samples_N
        ]

    def own_advantages(self, samples_N: Sequence[Sample]) -> list[FloatArray] | None:
        """Advantages of an estimator whose baseline is ``NONE``, each of shape [T]; others return ``None``."""
        return None

    def check(self, samples_N: Sequence[Sample]) -> None:
        """Refuse samples that the estimator cannot be trusted with.

        Raises:
            ValueError: If something it `needs` is missing.
        """
        if Need.OLD_LOGPROBS in self.needs:
            self._check_each(samples_N, lambda sample: sample.old_T is not None, "old_logprobs_T")

    def _check_each(self, samples_N: Sequence[Sample], is_met: Callable[[Sample], bool], wanted: str) -> None:
        for index, sample in enumerate(samples_N):
            if not is_met(sample):
                raise ValueError(
                    f"{self.name} needs {wanted}; sample {index} (strategy {sample.strategy!r}) does not have it. "
                    "Score the completion in a pass before the update, or use importance_sampling, which needs none."
                )
