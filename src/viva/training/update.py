"""One policy update: datums in, weights changed, numbers out.

Was an optimiser step applied twice? If an answer is lost, the SDK sends the request again, and servers that do not look
at its number do it twice, which moves the weights by what the optimiser remembers. Engines that report the gradient's
norm give it away: the first step has used the gradient up, so the second one's is exactly 0.

Legend: ``_D`` datums.
"""

import math
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise

import numpy as np
import tinker

from viva.engine.adam import check_adam
from viva.sdk import TrainingClient, takes_mask, takes_temperature
from viva.training.data_processing import ScoredDatum
from viva.training.metrics import logprob_metrics, mean_by_key
from viva.training.remote import EngineError

EXACT_GAP = 1e-4
"""Nats by which sampler and trainer may differ if both compute in float32 with the same weights: root mean square over
the tokens of a step. Where a model's layers nearly cancel, a single token may differ by ten times as much."""
_RARE = 10


class SamplerGapError(FloatingPointError):
    """Sampler and trainer do not compute the same policy."""


def trained_temperature(loss_fn_config: Mapping[str, float] | None) -> float:
    """The temperature of the policy that is trained: the loss divides its logits by it. Only local engines can."""
    return (loss_fn_config or {}).get("temperature", 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConfig:
    """Loss and optimiser. The loss is a sum over tokens; Adam makes its scale unimportant."""

    learning_rate: float
    loss_fn: str = "importance_sampling"
    loss_fn_config: Mapping[str, float] | None = None
    num_substeps: int = 1
    """Optimiser steps per batch; each gets an equal share of the datums."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Largest global gradient norm; 0 does not clip."""
    max_logprob_gap: float | None = None
    """Most by which sampler and trainer may differ, see `EXACT_GAP`; ``None`` only reports it."""

    def __post_init__(self) -> None:
        """Reject settings that cannot train."""
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"learning_rate must be a positive number; got {self.learning_rate}")
        if self.num_substeps < 1:
            raise ValueError(f"num_substeps must be 1 or more; got {self.num_substeps}")
        check_adam(self.adam_params())

    @property
    def temperature(self) -> float:
        """See `trained_temperature`."""
        return trained_temperature(self.loss_fn_config)

    def adam_params(self) -> tinker.AdamParams:
        """The optimiser's settings as the engine takes them."""
        return tinker.AdamParams(
            learning_rate=self.learning_rate,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            grad_clip_norm=self.grad_clip_norm,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """The logprobs and metrics of an update."""

    logprobs_D: Sequence[tinker.TensorData]
    """Logprobs of every target token that is not masked, under the policy that the gradient was taken of."""
    metrics: dict[str, float]


def _minibatches(data_D: Sequence[tinker.Datum], count: int) -> list[Sequence[tinker.Datum]]:
    """At most `count` contiguous shares that differ in size by at most one; none is empty."""
    count = min(count, len(data_D))
    bounds = [index * len(data_D) // count for index in range(count + 1)]
    return [data_D[start:stop] for start, stop in pairwise(bounds)]


def for_engine(client: TrainingClient, data_D: Sequence[tinker.Datum]) -> list[tinker.Datum]:
    """Datums as an engine takes them: servers know only advantages, the local engine saves what the mask hides."""
    return list(data_D) if takes_mask(client) else [_without_mask(datum) for datum in data_D]


def _without_mask(datum: tinker.Datum) -> tinker.Datum:
    inputs = {name: tensor for name, tensor in datum.loss_fn_inputs.items() if name != "mask"}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


def send(
    client: TrainingClient, data_D: Sequence[tinker.Datum], config: UpdateConfig
) -> Awaitable[tinker.ForwardBackwardOutput]:
    """Submit a ``forward_backward``.

    Raises:
        FloatingPointError: If an advantage or a logprob of the data is not finite; nothing is submitted.
    """
    _check_data(data_D)
    loss_fn_config = None if config.loss_fn_config is None else dict(config.loss_fn_config)
    return client.forward_backward(for_engine(client, data_D), config.loss_fn, loss_fn_config)


async def trainer_logprobs(
    client: TrainingClient, data_D: Sequence[tinker.Datum], *, temperature: float
) -> list[tinker.TensorData]:
    """The trainer's logprobs of the datums' targets at a temperature, before an update."""
    if not data_D:
        return []
    config = None if temperature == 1 else {"temperature": temperature}
    output = await client.forward(for_engine(client, data_D), "importance_sampling", config)
    return [record["logprobs"] for record in output.loss_fn_outputs]


async def check_sampler(
    client: TrainingClient, data_D: Sequence[tinker.Datum], *, temperature: float
) -> list[ScoredDatum]:
    """Score sampled tokens before an update; nothing where an engine cannot score at the temperature of the samples.

    The datums have the contexts and the logprobs of the sampler. Greedy samples (temperature 0) have the logprobs of
    temperature 1.
    """
    scored_at = temperature or 1.0
    if scored_at != 1 and not takes_temperature(client):
        return []
    return [*zip(data_D, await trainer_logprobs(client, data_D, temperature=scored_at), strict=True)]


async def _anchored(
    client: TrainingClient, data_D: Sequence[tinker.Datum], temperature: float
) -> list[tinker.Datum]:
    """Datums whose context tokens have the trainer's own logprobs as their sampling logprobs.

    DRO's quadratic term pulls every token towards its sampling logprob; with the trainer's own it vanishes.
    """
    bare_D = [_without_mask(datum) for datum in data_D]
    own_D = await trainer_logprobs(client, bare_D, temperature=temperature)
    anchored: list[tinker.Datum] = []
    for datum, bare, own_T in zip(data_D, bare_D, own_D, strict=True):
        is_action_T = datum.loss_fn_inputs["mask"].to_numpy() > 0
        logprobs_T = np.where(is_action_T, bare.loss_fn_inputs["logprobs"].to_numpy(), own_T.to_numpy())
        inputs = bare.loss_fn_inputs | {
            "logprobs": tinker.TensorData.from_numpy(logprobs_T.astype(np.float32))
        }
        anchored.append(tinker.Datum(model_input=bare.model_input, loss_fn_inputs=inputs))
    return anchored


async def update_policy(
    client: TrainingClient,
    data_D: Sequence[tinker.Datum],
    config: UpdateConfig,
    *,
    foreign_D: Sequence[bool] | None = None,
    check: Sequence[ScoredDatum] = (),
    sent: Sequence[Awaitable[tinker.ForwardBackwardOutput]] | None = None,
) -> UpdateResult:
    """``forward_backward`` and ``optim_step`` for every minibatch.

    All requests are submitted before the first is awaited, so that a remote engine can pipeline them. No data means no
    step.

    The logprobs of ``foreign_D`` are not those of what is trained (another context, another temperature, or the
    trainer's own): metrics of drift and entropy leave them out, and have ``check`` instead, see `check_sampler`.
    ``sent`` are requests with all of the datums, in order, that were sent before, for a single substep.

    Raises:
        FloatingPointError: If a number of the data or of the engine's answers is not finite.
        SamplerGapError: If sampler and trainer are farther apart than allowed. The weights were changed by then: save
            nothing.
    """
    metrics: dict[str, float] = {
        "optim/lr": config.learning_rate,
        "optim/datums": len(data_D),
        "optim/steps": 0,
    }
    if not data_D:
        checked = logprob_metrics(check)
        _check_gap(checked, config.max_logprob_gap)
        return UpdateResult(logprobs_D=(), metrics=metrics | checked)
    pending: list[
        tuple[Sequence[Awaitable[tinker.ForwardBackwardOutput]], Awaitable[tinker.OptimStepResponse]]
    ] = []
    minibatches = _minibatches(data_D, config.num_substeps)
    for minibatch in minibatches:
        requests = sent
        if requests is None:
            data = minibatch
            if config.loss_fn == "dro":
                data = await _anchored(client, minibatch, config.temperature)
            requests = [send(client, data, config)]
        pending.append((requests, client.optim_step(config.adam_params())))
    outputs: list[tinker.ForwardBackwardOutput] = []
    responses: list[tinker.OptimStepResponse] = []
    for requests, optim_step in pending:
        outputs.append(_joined([await request for request in requests]))
        responses.append(await optim_step)
    for minibatch, output, response in zip(minibatches, outputs, responses, strict=True):
        check_applied_once(minibatch, output, response, config.loss_fn)
    logprobs_D = [record["logprobs"] for output in outputs for record in output.loss_fn_outputs]
    metrics |= {
        "optim/steps": len(pending),
        "optim/tokens": sum(datum.model_input.length for datum in data_D),
    }
    scored_D = [*zip(data_D, logprobs_D, strict=True)]
    is_own_D = [True] * len(data_D) if foreign_D is None else [not foreign for foreign in foreign_D]
    metrics |= logprob_metrics([*compress(scored_D, is_own_D), *check])
    logprob_metrics(scored_D)  # those of the others must be numbers, too
    metrics |= _engine_metrics(outputs, responses)
    before_any_step = [*compress(scored_D[: len(minibatches[0])], is_own_D), *check]
    _check_gap(logprob_metrics(before_any_step), config.max_logprob_gap)
    return UpdateResult(logprobs_D=logprobs_D, metrics=metrics)


async def imitate(
    client: TrainingClient, data_D: Sequence[tinker.Datum], config: UpdateConfig
) -> dict[str, float]:
    """One optimiser step on the cross-entropy of completions; metrics, ``imitation/nll`` in nats per token.

    Raises:
        FloatingPointError: If the engine's answer is not finite.
    """
    from tinker_cookbook.supervised.common import compute_mean_nll

    pending = client.forward_backward(list(data_D), "cross_entropy")
    stepping = client.optim_step(config.adam_params())
    output, response = await pending, await stepping
    weights_D = [datum.loss_fn_inputs["weights"] for datum in data_D]
    nll = compute_mean_nll([record["logprobs"] for record in output.loss_fn_outputs], weights_D)
    if not math.isfinite(nll):
        raise FloatingPointError(
            f"the completions cost {nll} nats per token, which is not a finite number; lower the learning rate"
        )
    return {
        "imitation/nll": nll,
        "imitation/tokens": math.fsum(float(weights_T.to_numpy().sum()) for weights_T in weights_D),
        "optim/lr": config.learning_rate,
        "optim/datums": len(data_D),
        "optim/steps": 1,
    } | _engine_metrics([output], [response])


def _check_data(data_D: Sequence[tinker.Datum]) -> None:
    for place, datum in enumerate(data_D):
        for name in ("advantages", "logprobs"):
            values = datum.loss_fn_inputs[name].to_numpy() if name in datum.loss_fn_inputs else np.empty(0)
            wrong = np.flatnonzero(~np.isfinite(values))
            if len(wrong):
                raise FloatingPointError(
                    f"{name} of datum {place} must be finite numbers; got {values[wrong[0]]} for token {wrong[0]}. "
                    "Look at the rewards and at the sampler's logprobs."
                )


def _check_gap(drift: Mapping[str, float], allowed: float | None) -> None:
    if allowed is None:
        return
    typical = math.sqrt(2.0 * drift.get("optim/kl_sample_train_v2", 0.0))
    largest = drift.get("optim/logprob_gap_max", 0.0)
    if typical > allowed or largest > _RARE * allowed:
        raise SamplerGapError(
            f"sampler and trainer differ by {typical:.2e} on the sampled tokens (root mean square), by {largest:.2e} "
            f"on one of them; with precision=float32 they must agree to {allowed:.0e}, and to {_RARE * allowed:.0e} on "
            "any one. So one of them is wrong, and this update is not to be trusted. Use other versions or another "
            "device, or precision=fast, which only reports the gap."
        )


def _joined(outputs: Sequence[tinker.ForwardBackwardOutput]) -> tinker.ForwardBackwardOutput:
    """The response to one request with the data of all; metrics other than the loss are averages."""
    names = sorted({name for output in outputs for name in output.metrics})
    columns = {name: [output.metrics[name] for output in outputs if name in output.metrics] for name in names}
    return tinker.ForwardBackwardOutput(
        loss_fn_output_type=outputs[0].loss_fn_output_type,
        loss_fn_outputs=[record for output in outputs for record in output.loss_fn_outputs],
        metrics={
            name: math.fsum(column) / (1 if name == "loss:sum" else len(column))
            for name, column in columns.items()
        },
    )


def _engine_metrics(
    outputs: Sequence[tinker.ForwardBackwardOutput], responses: Sequence[tinker.OptimStepResponse]
) -> dict[str, float]:
    """The engine's own metrics, averaged over the substeps (``loss:sum`` becomes ``optim/loss``)."""
    rows = [output.metrics for output in outputs] + [response.metrics or {} for response in responses]
    for key, value in ((key, value) for row in rows for key, value in row.items()):
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the engine reported {key}={value}, which is not a finite number; this update is not to be trusted"
            )
    return mean_by_key(
        {
            "optim/loss" if key == "loss:sum" else f"optim/{key.removeprefix('optim/')}": value
            for key, value in row.items()
        }
        for row in rows
    )


_NORM = "grad_norm"
_CLIPPING = "ppo"
"""Gives no gradient where it clips, so that zero says nothing."""
_LEAST = 1e-6
"""Advantages and logprobs nearer to 0 than this may give a gradient that is rounded to 0."""


class RepeatedStepError(EngineError):
    """The engine's weights are no longer those of the run."""


def check_applied_once(
    data_D: Sequence[tinker.Datum],
    output: tinker.ForwardBackwardOutput,
    response: tinker.OptimStepResponse,
    loss_fn: str,
) -> None:
    """Make sure that a step used the gradient of the data it followed.

    Raises:
        RepeatedStepError: If the gradient was used up before.
    """
    metrics = response.metrics or {}
    norms = [value for name, value in metrics.items() if name.rpartition("/")[2] == _NORM]
    if loss_fn == _CLIPPING or any(norms) or not norms:
        return
    if _has_gradient(data_D, output):
        raise RepeatedStepError(
            "the engine has applied an optimiser step twice: an answer was lost, the request was sent again, and "
            "the gradient was gone by then. The weights since the last checkpoint are not to be trusted."
        )


def _has_gradient(data_D: Sequence[tinker.Datum], output: tinker.ForwardBackwardOutput) -> bool:
    """Whether the gradient cannot be 0: a token that is not certain has an advantage that its equals do not undo."""
    nets: dict[tuple[bytes, bytes], np.ndarray] = defaultdict(lambda: np.zeros(1))
    for datum, record in zip(data_D, output.loss_fn_outputs, strict=True):
        targets_T = datum.loss_fn_inputs["target_tokens"].to_numpy()
        is_open_T = record["logprobs"].to_numpy() < -_LEAST
        tokens_T = np.asarray(datum.model_input.to_ints())
        key = (tokens_T.tobytes(), targets_T.tobytes())
        nets[key] = nets[key] + is_open_T * datum.loss_fn_inputs["advantages"].to_numpy()
    return any(bool(np.any(np.abs(net_T) > _LEAST)) for net_T in nets.values())
