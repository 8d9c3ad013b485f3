"""Samples as JSON objects, and back: what a run keeps so that its batches can be estimated again without sampling.

Numbers are kept exactly. The one value JSON has no word for, minus infinity (a token that a truncated context cannot
say), is written as null.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from viva.experts.estimators.base import FloatArray, Sample

__all__ = ["sample_record", "stored_sample"]

_Logprobs = list[float | None]


class _Record(BaseModel):
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
    """A sample as a JSON object.

    Args:
        sample: The sample.
        prompt: What stands for its prompt, which may be any object; equal prompts of a batch need equal ones.
    """
    return {
        "strategy": sample.strategy,
        "prompt": prompt,
        "reward": sample.reward,
        "on_policy": sample.on_policy,
        "finished": sample.finished,
        "context": sample.context,
        "sampling_logprobs": _listed(sample.sampling_logprobs_T),
        "old_logprobs": None if sample.old_logprobs_T is None else _listed(sample.old_logprobs_T),
        "context_logprobs": {name: _listed(values) for name, values in sample.context_logprobs.items()},
        "advantages": None if sample.advantages_T is None else _listed(sample.advantages_T),
        "checked_logprobs": None if sample.checked_logprobs_T is None else _listed(sample.checked_logprobs_T),
    }


def stored_sample(record: Mapping[str, Any]) -> Sample:
    """The sample that `sample_record` made the object of; keys of other things must be taken out before.

    Raises:
        ValueError: If it is no such object, or holds what no sample can have.
    """
    try:
        stored = _Record.model_validate(dict(record))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"a stored sample has a damaged {place!r}: {first['msg']}") from error
    return Sample(
        strategy=stored.strategy,
        prompt=stored.prompt,
        reward=stored.reward,
        on_policy=stored.on_policy,
        finished=stored.finished,
        context=stored.context,
        sampling_logprobs_T=_array(stored.sampling_logprobs),
        old_logprobs_T=None if stored.old_logprobs is None else _array(stored.old_logprobs),
        context_logprobs={name: _array(values) for name, values in stored.context_logprobs.items()},
        advantages_T=None if stored.advantages is None else _array(stored.advantages),
        checked_logprobs_T=None if stored.checked_logprobs is None else _array(stored.checked_logprobs),
    )


def _listed(values_T: FloatArray) -> list[float | None]:
    return [None if value == -math.inf else float(value) for value in values_T]


def _array(values: _Logprobs) -> FloatArray:
    return np.array([-math.inf if value is None else value for value in values], dtype=np.float64)
