"""KL penalty: what it costs the policy to leave its reference, the policy at the start of the run.

Every sampled token of the trained policy gets ``coef * (mean - k)`` on its advantage, with ``k = log q - log p`` of the
policy ``q`` that sampled it and the reference ``p``, and the mean of ``k`` over the batch. Tokens that earned nothing
have it, too. In expectation over samples of ``q`` that is minus the gradient of ``coef * KL(q || p)`` of the next token
at every position that was reached; what a token does to the positions behind it is not credited to it. The form is that
of tinker-cookbook's ``incorporate_kl_penalty`` without its discount.

Legend: ``_D`` datums, ``_T`` tokens of a datum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, cast

import numpy as np
import tinker

from viva.conversation.coordinator import gather_or_cancel
from viva.experts.samples import FloatArray
from viva.judging.judge import PolicyRef, accepts, response_of
from viva.training.batch import Batch
from viva.training.data_processing import action_values, trained_values
from viva.training.samples import with_values

_LAST = "prompt_logprobs_last_n"


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPenalty:
    """The reference of a run, and the weight of the distance from it.

    Raises:
        ValueError: If the weight is not a positive number.
    """

    coef: float
    """In units of advantage by nat."""
    reference: PolicyRef

    def __post_init__(self) -> None:
        if not (math.isfinite(self.coef) and self.coef > 0):
            raise ValueError(f"the weight of a KL penalty must be a positive number; got {self.coef}")


async def penalised(batch: Batch, penalty: KlPenalty) -> Batch:
    """The batch with the penalty on the advantages of all datums that were drawn from what is trained.

    Metrics are ``optim/kl_reference``, the mean of ``k`` in nats by token, and ``optim/reference_tokens``, those that
    the reference read, contexts included. Samples behind swapped contexts tell nothing of the KL divergence that is
    trained, and have no penalty; a batch of nothing else has a warning instead of ``optim/kl_reference``.

    Raises:
        FloatingPointError: If the reference gives a token no logprob that is a finite number.
    """
    is_own_D = [not foreign for foreign in batch.foreign_D]
    own_D = [*compress(batch.data_D, is_own_D)]
    gaps_D = await gather_or_cancel(_gaps(datum, penalty.reference) for datum in own_D)
    metrics = batch.metrics | {"optim/reference_tokens": sum(datum.model_input.length for datum in own_D)}
    if not own_D:
        told = "kl_penalty: no sample of this batch was drawn from the policy that is trained, so none is penalised"
        return replace(batch, metrics=metrics, warnings=[*batch.warnings, *([told] if batch.data_D else [])])
    gaps_T = np.concatenate(gaps_D)
    mean = float(gaps_T.mean())
    advantages_T, logprobs_T = (
        np.concatenate([action_values(datum, name) for datum in own_D]) for name in ("advantages", "logprobs")
    )
    changed = iter(with_values(own_D, advantages_T + penalty.coef * (mean - gaps_T), logprobs_T))
    return replace(
        batch,
        data_D=[
            next(changed) if is_own else datum for datum, is_own in zip(batch.data_D, is_own_D, strict=True)
        ],
        metrics=metrics | {"optim/kl_reference": mean},
    )


async def _gaps(datum: tinker.Datum, reference: PolicyRef) -> FloatArray:
    """``log q - log p`` of a datum's trained tokens."""
    targets_T = datum.loss_fn_inputs["target_tokens"]
    prompt = datum.model_input.append_int(int(cast(Sequence[int], targets_T.data)[-1]))
    length = len(targets_T.data)
    client: Any = reference.current()  # judges need less of a client
    # what stands before the first trained token is read once for all that begin with it
    scored = length - int(np.argmax(datum.loss_fn_inputs["mask"].to_numpy() > 0))
    options = {_LAST: scored} if accepts(client.compute_logprobs, _LAST) else {}
    found: Sequence[float | None] = await response_of(client.compute_logprobs(prompt, **options))
    # some engines leave out the place of the first token
    logprobs = [math.nan if logprob is None else logprob for logprob in found[-length:]]
    logprobs += [math.nan] * (length - len(logprobs))
    own_T = trained_values(datum, tinker.TensorData(data=logprobs, dtype="float32", shape=[length]))
    if not np.isfinite(own_T).all():
        raise FloatingPointError(
            "the reference of the KL penalty gave a token no usable logprob; use an engine that scores prompts (the "
            "local one does), or kl_penalty_coef=0"
        )
    return action_values(datum, "logprobs") - own_T
