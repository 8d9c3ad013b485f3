"""The estimators of expert iteration, each with its formula and source, and the registry that finds them by name."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, get_type_hints

import numpy as np

from viva.experts.estimation import (
    Baseline,
    Estimator,
    Need,
    SampleWeights,
    bounded,
    constant_weights,
)
from viva.experts.samples import FloatArray, Sample, context_gap, total_context_gap


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling(Estimator):
    """Weight 1, anchor ``log q(y_t | x_sample)``: the loss makes it ``p_theta(y_t | x_train) / q(y_t | x_sample)``.

    Needs no scoring pass for its weights (the loop makes one for the figures): one ratio for staleness and context gap.
    The ratio is per token, so past tokens count as they were sampled: exact only where the contexts are equal. Nothing
    is truncated. Do not combine it with a clipping loss: clipping the whole ratio drops what should be unlearnt and
    keeps what should be imitated (see docs/estimators.md).
    """

    name: ClassVar[str] = "importance_sampling"
    needs: ClassVar[frozenset[Need]] = frozenset()
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.STRATUM, Baseline.PROMPT_UNION)
    anchors_at_sampling: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class TokenTIS(Estimator):
    """Weight ``min(exp(l_t), cap)`` for each token, anchor ``p_old``.

    Truncated importance sampling (Ionides 2008) as used between sampler and trainer by Yao et al. 2025 ("Your efficient
    RL framework secretly brings you off-policy RL training"). Tokens that only the hint made likely weigh nearly
    nothing, tokens that both contexts would say weigh about one. Biased (past tokens count as sampled), but bounded.

    Raises:
        ValueError: If `cap` is not a finite number of 1 or more.
    """

    cap: float = bounded(2.0, least=1)

    name: ClassVar[str] = "token_tis"
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.STRATUM, Baseline.PROMPT_UNION, Baseline.WEIGHTED)

    def weigh(self, sample: Sample) -> SampleWeights:
        """Truncated ratios."""
        gap_T, log_cap = context_gap(sample), math.log(self.cap)
        return SampleWeights(weights_T=np.exp(np.minimum(gap_T, log_cap)), clipped_T=gap_T > log_cap)


@dataclass(frozen=True, kw_only=True)
class Balance(Estimator):
    """Weight ``w = p_old(y | x_train) / sum_c (n_c / N) q_c(y)`` for every token, over the contexts c of the prompt.

    The balance heuristic of multiple importance sampling (Veach and Guibas 1995), also known as the deterministic
    mixture (Hesterberg 1995; Owen and Zhou 2000): unbiased for the samples of a prompt taken together, and with an
    on-policy share a the weights never exceed 1/a. Where the gap is tens of nats the hinted samples' weights
    vanish and what is left is the on-policy share: safe, but then the hints teach nothing (see the diagnostics).

    Every completion is scored under the other contexts of its prompt; a context that is itself sampled (feedback)
    counts as it was realised. The on-policy context needs no scoring beyond ``old_logprobs_T``. The weights are the
    mixture: no further mixture weights. A baseline per stratum would break unbiasedness and is not offered. The
    ``weighted`` baseline, being a ratio, leaves a bias of order 1/N^2 and takes away most of the variance;
    ``prompt_union`` is exactly unbiased and, where hints succeed more often than the policy, very noisy.
    """

    name: ClassVar[str] = "balance"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS, Need.CONTEXT_LOGPROBS})
    is_unbiased: ClassVar[bool] = True
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.WEIGHTED, Baseline.PROMPT_UNION)
    combines_strategies: ClassVar[bool] = True

    def weights(self, samples_N: Sequence[Sample]) -> list[SampleWeights]:
        """Mixture ratios."""
        contexts = _contexts(samples_N)
        on_policy = _on_policy_contexts(samples_N)
        return [
            SampleWeights.of_log(sample, self._log_weight(sample, contexts[sample.prompt], on_policy))
            for sample in samples_N
        ]

    @staticmethod
    def _log_weight(
        sample: Sample, counts: Counter[str], on_policy: frozenset[tuple[Hashable, str]]
    ) -> float:
        assert sample.old_T is not None  # check() has seen to it
        old = float(sample.old_T.sum())
        logs: list[float] = []
        for context, count in sorted(counts.items()):
            if context == sample.context_name:
                scored = float(sample.sampling_logprobs_T.sum())
            elif context in sample.context_logprobs:
                scored = float(sample.context_logprobs[context].sum())
            else:
                assert (sample.prompt, context) in on_policy
                scored = old
            logs.append(math.log(count / counts.total()) + scored)
        top = max(logs)
        return old - top - math.log(math.fsum(math.exp(log - top) for log in logs))

    def check(self, samples_N: Sequence[Sample]) -> None:
        """Every sample needs its score under every other context of its prompt."""
        super().check(samples_N)
        contexts = _contexts(samples_N)
        on_policy = _on_policy_contexts(samples_N)
        for index, sample in enumerate(samples_N):
            for context in sorted(contexts[sample.prompt]):
                is_known = context == sample.context_name or context in sample.context_logprobs
                if not is_known and (sample.prompt, context) not in on_policy:
                    raise ValueError(
                        f"balance needs context_logprobs of every context of a prompt; sample {index} (strategy "
                        f"{sample.strategy!r}) has no score under {context!r}. Score it there, or use token_tis."
                    )


def _contexts(samples_N: Sequence[Sample]) -> dict[Hashable, Counter[str]]:
    """Per prompt, how many samples were drawn under each realised context."""
    counts: dict[Hashable, Counter[str]] = {}
    for sample in samples_N:
        counts.setdefault(sample.prompt, Counter())[sample.context_name] += 1
    return counts


def _on_policy_contexts(samples_N: Sequence[Sample]) -> frozenset[tuple[Hashable, str]]:
    """Prompts and contexts that draw from p_old itself."""
    return frozenset((sample.prompt, sample.context_name) for sample in samples_N if sample.on_policy)


@dataclass(frozen=True, kw_only=True)
class NoCorrection(Estimator):
    """Weight 1, anchor ``p_old``: policy gradient as if the completion had been drawn under the training context.

    Never uses the sampler's probabilities, so it has low variance at any gap. Its expected update is the gradient of
    ``E_q[A log p]``: imitation of good hinted answers, avoidance of bad ones, with a pull as strong as the gap
    (an update many times larger than the on-policy one for the same advantages).
    """

    name: ClassVar[str] = "none"
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.STRATUM, Baseline.PROMPT_UNION)


@dataclass(frozen=True, kw_only=True)
class Positives(Estimator):
    """Weight 1, advantage 1 for finished samples with a reward above `threshold`, 0 for all others; anchor ``p_old``.

    The filter of STaR (Zelikman et al. 2022, arXiv 2203.14465) and ReST-EM (Singh et al. 2023, arXiv 2312.06585):
    maximum likelihood on successes. Learns fastest where the policy hardly ever succeeds by itself, and learns
    whatever the hint put into successful answers, also what earns nothing (its style). There is no contrast that
    could take that away again, so watch the leak rate.

    Raises:
        ValueError: If `threshold` is not a finite number.
    """

    threshold: float = bounded(0.0, least=-math.inf)

    name: ClassVar[str] = "positives"
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.NONE,)

    def own_advantages(self, samples_N: Sequence[Sample]) -> list[FloatArray]:
        """One or zero; zero, too, where a sample brings an advantage of its own that is not positive."""
        return [
            (
                constant_weights(sample, float(sample.finished and sample.reward > self.threshold))
                * (1.0 if sample.advantages_T is None else sample.advantages_T > 0)
            )
            for sample in samples_N
        ]


@dataclass(frozen=True, kw_only=True)
class Shaped(Estimator):
    """Weight ``rho_t / (rho_t + gamma)`` with ``rho_t = exp(l_t)``, anchor ``p_old``; weight 1 for on-policy samples.

    Policy shaping of LUFFY (Yan et al. 2025, arXiv 2504.14945), which puts p_theta itself in the place of the ratio
    because its experts' probabilities are unknown; ours are known. Below ``gamma`` the weight falls like the ratio,
    above it the weight is nearly one. The paper centres over all samples of a prompt (``prompt_union``); the default
    is ``stratum``, where failures under the same hint cancel the hint's style.

    Raises:
        ValueError: If `gamma` is not a positive finite number.
    """

    gamma: float = bounded(0.1, least=0, above=True)

    name: ClassVar[str] = "shaped"
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.STRATUM, Baseline.PROMPT_UNION, Baseline.WEIGHTED)

    def weigh(self, sample: Sample) -> SampleWeights:
        """Shaped ratios; ``sigmoid(l_t - log gamma)`` is the formula without overflow."""
        if sample.on_policy:
            return SampleWeights.constant(sample, 1.0)
        shaped_T = np.exp(-np.logaddexp(0.0, math.log(self.gamma) - context_gap(sample)))
        return SampleWeights(weights_T=shaped_T, clipped_T=np.zeros(len(sample), dtype=np.bool_))


@dataclass(frozen=True, kw_only=True)
class SequenceTIS(Estimator):
    """Weight ``min(W, cap)`` with ``W = exp(sum_t l_t)`` for every token, anchor ``p_old``.

    Truncated importance sampling (Ionides 2008) on sequences. Truncation makes ``E_q[w grad log p]`` differ from zero:
    subtracting a plain group mean would then add a bias along it, strong enough to reverse the update. Therefore the
    weighted mean is the only baseline.

    Raises:
        ValueError: If `cap` is not a finite number of 1 or more.
    """

    cap: float = bounded(5.0, least=1)

    name: ClassVar[str] = "seq_tis"
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.WEIGHTED,)

    def weigh(self, sample: Sample) -> SampleWeights:
        """Truncated sequence ratio."""
        log, log_cap = total_context_gap(sample), math.log(self.cap)
        return SampleWeights.constant(sample, math.exp(min(log, log_cap)), is_clipped=log > log_cap)


@dataclass(frozen=True, kw_only=True)
class SequenceIS(Estimator):
    """Weight ``W = exp(sum_t l_t)`` for every token of the completion, anchor ``p_old``.

    Importance sampling as in every textbook; the "unbiased" form of the plan. Its variance grows exponentially with
    the gap: already at two nats a handful of samples carry the whole batch. For tests and tiny gaps only, hence
    the refusal. (Weights end at ``exp(60)``, far beyond any use.)

    Raises:
        ValueError: If `max_gap` is not positive; from `check`, if a strategy's mean gap ``E_q[-log W]`` (the divergence
            of q from the policy on the training context, in nats) is above `max_gap` and `force` is not set.
    """

    max_gap: float = 2.0
    force: bool = False

    name: ClassVar[str] = "seq_is"
    is_unbiased: ClassVar[bool] = True
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.WEIGHTED, Baseline.PROMPT_UNION, Baseline.STRATUM)

    def __post_init__(self) -> None:
        if not self.max_gap > 0:
            raise ValueError(f"seq_is: max_gap must be positive (nats); got {self.max_gap}")

    def weigh(self, sample: Sample) -> SampleWeights:
        """Sequence ratio."""
        return SampleWeights.of_log(sample, total_context_gap(sample))

    def check(self, samples_N: Sequence[Sample]) -> None:
        """Refuse large gaps."""
        super().check(samples_N)
        gaps: dict[str, list[float]] = {}
        for sample in samples_N:
            gaps.setdefault(sample.strategy, []).append(-total_context_gap(sample))
        for strategy, values in sorted(gaps.items()):
            gap = math.fsum(values) / len(values)
            if gap > self.max_gap and not self.force:
                raise ValueError(
                    f"seq_is: strategy {strategy!r} has a mean context gap of {gap:.2f} nats, at most {self.max_gap} "
                    "are allowed: beyond that a few samples carry all the weight. Use balance or token_tis, "
                    "or set force=True to see for yourself."
                )


@dataclass(frozen=True, kw_only=True)
class Distill(Estimator):
    """On-policy reverse KL: advantage ``a_t = log p(y_t | x_hint) - log p_old(y_t | x_train)``, anchor ``p_old``.

    Only on-policy samples teach (others get weight 0); no ratio is needed at any gap, and rewards are not used. The
    teacher is the same model under the context named `teacher`, scored on the student's completions: on-policy
    distillation (Agarwal et al. 2024, arXiv 2306.13649) with a privileged self-teacher (OPSD, arXiv 2601.18734;
    SDFT, arXiv 2601.19897). With ``horizon="return"`` a token gets ``sum_(u >= t) a_u``, whose expected update is
    exactly the gradient of ``-KL(p(. | x_train) || p(. | x_hint))``; ``"token"`` keeps ``a_t``: each step's own
    divergence at the states the student visits, biased for the whole and of much lower variance.

    Raises:
        ValueError: If `coefficient` is not a positive finite number or `horizon` has no meaning.
    """

    teacher: str
    coefficient: float = bounded(1.0, least=0, above=True)
    horizon: Literal["token", "return"] = "token"

    name: ClassVar[str] = "distill"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.CONTEXT_LOGPROBS})
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.NONE,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.horizon not in ("token", "return"):
            raise ValueError(f"distill: horizon must be 'token' or 'return'; got {self.horizon!r}")

    def weigh(self, sample: Sample) -> SampleWeights:
        """One for on-policy samples, zero for the others."""
        return SampleWeights.constant(sample, float(sample.on_policy))

    def own_advantages(self, samples_N: Sequence[Sample]) -> list[FloatArray]:
        """Log-ratio of teacher and student, per token."""
        return [
            self._advantages(sample) if sample.on_policy else constant_weights(sample, 0.0)
            for sample in samples_N
        ]

    def _advantages(self, sample: Sample) -> FloatArray:
        assert sample.old_T is not None
        gap_T = self.coefficient * (sample.context_logprobs[self.teacher] - sample.old_T)
        return np.cumsum(gap_T[::-1])[::-1] if self.horizon == "return" else gap_T

    def check(self, samples_N: Sequence[Sample]) -> None:
        """There must be on-policy samples, each with finite scores of the teacher."""
        if samples_N and not any(sample.on_policy for sample in samples_N):
            raise ValueError(
                "distill learns from on-policy samples only, and the batch has none: add the iid strategy"
            )
        student_N = [sample for sample in samples_N if sample.on_policy]
        self._check_each(
            student_N,
            lambda sample: self.teacher in sample.context_logprobs,
            f"context_logprobs[{self.teacher!r}]",
        )
        for sample in student_N:
            if not np.isfinite(sample.context_logprobs[self.teacher]).all():
                raise ValueError(
                    f"distill: the teacher {self.teacher!r} gives a sampled token probability 0; "
                    "score the teacher without truncation (top_p = 1, top_k = -1)"
                )


ESTIMATORS: dict[str, type[Estimator]] = {
    each.name: each
    for each in (
        ImportanceSampling,
        TokenTIS,
        Balance,
        NoCorrection,
        Positives,
        Shaped,
        SequenceTIS,
        SequenceIS,
        Distill,
    )
}
"""Every estimator by name."""

DEFAULT_ESTIMATOR = Shaped.name
"""Chosen from the tables in docs/estimators.md."""


def make_estimator(name: str, **options: float | str | bool) -> Estimator:
    """An estimator by name, with its own options (``token_tis`` has ``cap``, and so on).

    Raises:
        ValueError: If there is no such estimator, if it has no such option, or if a value makes no sense for it.
    """
    if name not in ESTIMATORS:
        raise ValueError(f"there is no estimator {name!r}; choose from {', '.join(ESTIMATORS)}")
    kind = ESTIMATORS[name]
    known = {each.name: each for each in fields(kind)}
    if unknown := sorted(set(options) - set(known)):
        has = f"has the options {', '.join(known)}" if known else "has no options"
        raise ValueError(f"{name} has no option {unknown[0]!r}; it {has}")
    required = {key for key, each in known.items() if each.default is MISSING}
    if missing := sorted(required - set(options)):
        raise ValueError(f"{name} needs the option {missing[0]!r}; see its documentation")
    for key, hint in get_type_hints(kind).items():
        if key in options and not _fits(options[key], hint):
            raise ValueError(f"{name}: {key} must be {_WORDS.get(hint, 'a value')}; got {options[key]!r}")
    return kind(**options)


_WORDS: dict[Any, str] = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}


def _fits(value: float | str | bool, hint: Any) -> bool:
    """Whether an option's value is of the declared type; a whole number is a number, a truth value is none."""
    if hint not in _WORDS:
        return True
    wanted = (int, float) if hint is float else hint
    return isinstance(value, wanted) and isinstance(value, bool) == (hint is bool)
