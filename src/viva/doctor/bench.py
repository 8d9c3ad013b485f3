"""The engine under examination: clients, the few requests that probes are made of, probes, and findings.

Legend: ``_T`` target tokens, ``_S`` sequences.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import tinker

from viva.judging.judge import SamplingClient, sample
from viva.sdk import ServiceClient, TrainingClient, settled

Answer: TypeAlias = Literal["yes", "no", "wrong"]
"""``no``: the engine refuses or fails. ``wrong``: it answers, but not with what the API promises."""


class WrongAnswerError(Exception):
    """The engine answers, but not with what the API promises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one probe."""

    name: str
    answer: Answer
    detail: str


Array = npt.NDArray[np.float64]

_SENTENCE = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."
_LENGTH = 8
"""Targets of most datums: one shape, since an engine may compile for each."""


@dataclass(kw_only=True)
class Bench:
    """An engine's clients. Probes that train move the weights, so a bench needs a training client of its own."""

    service: ServiceClient
    client: TrainingClient
    tolerance: float = 0.1
    """Mean absolute difference of logprobs that rounding may make; bfloat16 needs a generous one."""
    learning_rate: float = 1e-4
    """Raised by `viva.doctor.training.aim` until a step shows."""
    noise: float = math.nan
    """Set by the same: changes of a logprob up to which nothing has moved."""
    tokenizer: Any = field(init=False)
    tokens: list[int] = field(init=False)
    """``[9]``, of a sentence: a first token and eight targets."""
    _sampler: SamplingClient | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Encode the sentence."""
        self.tokenizer = self.client.get_tokenizer()
        tokens: list[int] = list(self.tokenizer.encode(_SENTENCE, add_special_tokens=False))
        self.tokens = (tokens * (_LENGTH + 1))[: _LENGTH + 1]

    @property
    def prompt(self) -> tinker.ModelInput:
        """The prompt that samples continue."""
        return tinker.ModelInput.from_ints(self.tokens)

    async def sampler(self) -> SamplingClient:
        """A snapshot of the weights as they are now."""
        client = self._sampler or await settled(self.client.save_weights_and_get_sampling_client())
        self._sampler = client
        return client

    async def draw(self, num_samples: int = 1, **settings: Any) -> list[tinker.SampledSequence]:
        """Completions of the prompt by the weights as they are now; settings of ``SamplingParams``."""
        defaults: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 1}
        params = tinker.SamplingParams(**(defaults | settings))
        response = await sample(await self.sampler(), self.prompt, params, num_samples=num_samples)
        return list(response.sequences)

    async def score(self, *tokens_S: Sequence[int], temperature: float = 1.0) -> list[Array]:
        """The trainer's logprobs of whole sequences, ``[len - 1]`` each, by a loss that divides its logits."""
        data = [
            policy_datum(tokens, np.zeros(len(tokens) - 1), np.zeros(len(tokens) - 1)) for tokens in tokens_S
        ]
        config = None if temperature == 1.0 else {"temperature": temperature}
        return logprobs_of(await self.client.forward(data, "importance_sampling", config), data)

    async def score_completions(self, *tokens_S: Sequence[int], temperature: float = 1.0) -> list[Array]:
        """The trainer's logprobs of completions of the prompt, ``[len]`` each."""
        scored = await self.score(*([*self.tokens, *tokens] for tokens in tokens_S), temperature=temperature)
        return [logprobs[len(self.tokens) - 1 :] for logprobs in scored]

    def check_gap(self, found_T: Array, expected_T: Array, what: str) -> float:
        """Mean absolute difference of logprobs.

        Raises:
            WrongAnswerError: If it is more than rounding makes; `what` says of what.
        """
        gap = float(np.abs(found_T - expected_T).mean())
        if not gap <= self.tolerance:
            raise WrongAnswerError(f"{what} by {gap:.2g} on average")
        return gap

    def check_tempered(self, found_S: Array, trained_S: Array, temperature: float) -> float:
        """Distance of logprobs of tokens at one place from the trainer's at a temperature.

        Raises:
            WrongAnswerError: If that is more than rounding makes, or they are nearer to those at temperature 1.
        """
        # the normalising constant falls out of differences
        seen, plain = (values - values.mean() for values in (found_S, trained_S))
        gap, untempered = (float(np.abs(seen - expected).mean()) for expected in (plain / temperature, plain))
        if gap > self.tolerance or gap > untempered:
            raise WrongAnswerError(
                f"the logprobs are not those of the distribution at temperature {temperature}: off by {gap:.2g} on "
                f"average; from those at temperature 1 by {untempered:.2g}"
            )
        return gap

    async def step(self, data: Sequence[tinker.Datum], loss_fn: str, **adam: float) -> None:
        """One step. Without further settings it is ``learning_rate`` times the sign of the gradient, without memory."""
        await self.client.forward_backward(list(data), loss_fn)
        await self.optim_step(**adam)

    async def optim_step(self, **adam: float) -> None:
        """The second half of `step`."""
        settings: Mapping[str, float] = {
            "learning_rate": self.learning_rate,
            "beta1": 0.0,
            "beta2": 0.0,
        } | adam
        self._sampler = None
        await self.client.optim_step(tinker.AdamParams(**settings))


def policy_datum(
    tokens: Sequence[int], logprobs_T: Array, advantages_T: Array, *, weighted: bool = False
) -> tinker.Datum:
    """A datum of next-token targets; there is one token more than targets.

    A `weighted` one is for ``cross_entropy``: the advantages are its weights, and it has no logprobs of the sampler.
    """
    inputs = {
        "target_tokens": tinker.TensorData(data=list(tokens[1:]), dtype="int64", shape=[len(tokens) - 1])
    }
    given = {"weights": advantages_T} if weighted else {"logprobs": logprobs_T, "advantages": advantages_T}
    inputs |= {name: tinker.TensorData.from_numpy(value.astype(np.float32)) for name, value in given.items()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


def logprobs_of(output: tinker.ForwardBackwardOutput, data: Sequence[tinker.Datum]) -> list[Array]:
    """Logprobs of each datum's targets.

    Raises:
        WrongAnswerError: If the engine has none for some datum or target.
    """
    records = output.loss_fn_outputs
    found = [
        record["logprobs"].to_numpy().astype(np.float64).reshape(-1)
        for record in records
        if "logprobs" in record
    ]
    lengths = [len(datum.loss_fn_inputs["target_tokens"].data) for datum in data]
    if [len(logprobs_T) for logprobs_T in found] != lengths:
        raise WrongAnswerError(
            f"data with {lengths} targets were given, logprobs came for {[len(logprobs_T) for logprobs_T in found]}"
        )
    return found


def total_loss(output: tinker.ForwardBackwardOutput) -> float | None:
    """The loss summed over all targets, if the engine has it: as a metric, or for every token."""
    if "loss:sum" in output.metrics:
        return float(output.metrics["loss:sum"])
    if all("elementwise_loss" in record for record in output.loss_fn_outputs):
        return float(sum(record["elementwise_loss"].to_numpy().sum() for record in output.loss_fn_outputs))
    return None


Probe: TypeAlias = Callable[[Bench], Awaitable[str]]
"""One question; returns a detail for the report. Raises `WrongAnswerError`, or whatever the engine raises."""
