"""Samples that were drawn under other contexts: what an estimator looks at, as a value and as a JSON object.

A completion ``y`` was drawn from ``q(. | x_sample)`` and is trained as a completion of ``x_train``. With
``l_t = log p_old(y_t | x_train, y_<t) - log q(y_t | x_sample, y_<t)``, the ratio between the policy being trained and
the sampler has two parts::

    p_theta / q  =  (p_theta / p_old on x_train)  *  (p_old on x_train / q)
                        staleness                        context gap, exp(l_t)

Legend: ``_T`` tokens of a completion. Logprobs are in nats.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

FloatArray: TypeAlias = npt.NDArray[np.float64]


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
    on_policy: bool = False
    """Whether q is p_old on x_train: same context and temperature, no truncation. Then no scoring pass is needed."""
    finished: bool = True
    """Whether the completion ended by itself, not by the token limit."""
    context: str | None = None
    """Name of the realised sampling context (feedback has one per sample) in the prompt; by default the strategy's."""
    sampling_logprobs_T: FloatArray
    """``log q(y_t | x_sample)`` of the distribution drawn from, temperature and truncation included."""
    old_logprobs_T: FloatArray | None = None
    """``log p_old(y_t | x_train)``, from a scoring pass before the update."""
    context_logprobs: Mapping[str, FloatArray] = field(default_factory=dict[str, FloatArray])
    """Per other context of the prompt ``log q_context(y_t)``; minus infinity for a token it cannot say."""
    advantages_T: FloatArray | None = None
    """Advantages that were made elsewhere (credit per span). They replace reward minus baseline."""
    checked_logprobs_T: FloatArray | None = None
    """The trainer's own values for `sampling_logprobs_T`: a difference is an error of one of them."""

    def __post_init__(self) -> None:
        if not np.isfinite(self.reward):
            raise ValueError(
                f"a sample of strategy {self.strategy!r} has reward {self.reward}; rewards are finite numbers"
            )
        length = None
        for name in _ARRAYS:  # the sampling logprobs say how long the others are
            values_T = getattr(self, name)
            if values_T is not None:
                array_T = _frozen_array(name, values_T, length, finite=True)
                object.__setattr__(self, name, array_T)
                length = len(self)
        frozen = {
            name: _frozen_array(f"context_logprobs[{name!r}]", values_T, length, finite=False)
            for name, values_T in sorted(self.context_logprobs.items())
        }
        object.__setattr__(self, "context_logprobs", frozen)

    def __len__(self) -> int:
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


_ARRAYS = ("sampling_logprobs_T", "old_logprobs_T", "advantages_T", "checked_logprobs_T")
_Logprobs = list[float | None]


class _SampleRecord(BaseModel):
    """A `Sample` in JSON: its fields without the suffix ``_T``, minus infinity as null."""

    model_config = ConfigDict(extra="forbid", strict=True)

    strategy: str
    prompt: int | str
    reward: float
    on_policy: bool
    finished: bool
    context: str | None
    sampling_logprobs: _Logprobs
    old_logprobs: _Logprobs | None
    context_logprobs: dict[str, _Logprobs]
    advantages: _Logprobs | None
    checked_logprobs: _Logprobs | None = None
    """Absent in runs of before."""


def sample_record(sample: Sample, *, prompt: int | str) -> dict[str, Any]:
    """A sample as a JSON object; equal prompts of a batch need an equal `prompt`, which stands for any object."""
    record = {each.name: getattr(sample, each.name) for each in fields(sample)}
    record |= {name: None if record[name] is None else _listed(record[name]) for name in _ARRAYS}
    record["context_logprobs"] = {name: _listed(own_T) for name, own_T in sample.context_logprobs.items()}
    return {name.removesuffix("_T"): value for name, value in record.items()} | {"prompt": prompt}


def stored_sample(record: Mapping[str, Any]) -> Sample:
    """The sample that `sample_record` made the object of; keys of other things must be taken out before.

    Raises:
        ValueError: If it is no such object, or holds what no sample can have.
    """
    try:
        stored = dict(_SampleRecord.model_validate(dict(record)))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"a stored sample has a damaged {place!r}: {first['msg']}") from error
    for name in _ARRAYS:
        values = stored.pop(name.removesuffix("_T"))
        stored[name] = None if values is None else _array(values)
    contexts = {name: _array(values) for name, values in stored.pop("context_logprobs").items()}
    return Sample(**stored, context_logprobs=contexts)


def _listed(values_T: FloatArray) -> _Logprobs:
    return [None if value == -math.inf else float(value) for value in values_T]


def _array(values: _Logprobs) -> FloatArray:
    return np.array([-math.inf if value is None else value for value in values], dtype=np.float64)
