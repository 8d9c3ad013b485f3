"""Engines that are sound but for one thing: the local one, wrapped."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import tinker

from viva.doctor.bench import Bench
from viva.sdk import make_response, make_sequence

UNHEARD = [] if hasattr(tinker.SampledSequence, "topk_logprobs") else ["top-k of samples"]
"""Probes for which this SDK has no field: older ones lack one."""


class Wrapped:
    """Passes everything on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Trainer(Wrapped):
    """A training client whose samplers are `sampler_class`."""

    sampler_class: type["Sampler"]

    def save_weights_and_get_sampling_client(self) -> Any:
        return self.sampler_class(self.inner.save_weights_and_get_sampling_client())


class Sampler(Wrapped):
    """A sampling client that changes requests or responses."""

    def sample(self, prompt: Any, num_samples: int, sampling_params: Any, **options: Any) -> Any:
        return self.answer(prompt, num_samples, sampling_params, options)

    async def answer(self, prompt: Any, num_samples: int, params: Any, options: dict[str, Any]) -> Any:
        return await self.inner.sample(prompt, num_samples, params, **options)


Trainer.sampler_class = Sampler


def changed(params: tinker.SamplingParams, **changes: Any) -> tinker.SamplingParams:
    return params.model_copy(update=changes)


def resampled(response: Any, change: Any, **prompt_fields: Any) -> Any:
    """The response with sequences of the changed ``(tokens, logprobs, stop_reason)``."""
    sequences = []
    for index, sequence in enumerate(response.sequences):
        tokens, logprobs, reason = change(
            list(sequence.tokens), list(sequence.logprobs), sequence.stop_reason
        )
        sequences.append(
            make_sequence(
                stop_reason=reason, sequence_id=str(index), tokens=tokens, logprobs=logprobs, topk=None
            )
        )
    return make_response(sequences, prompt_fields)


class IgnoresTheLoss(Trainer):
    def forward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        return self.inner.forward(data, self._known(loss_fn), None)

    def forward_backward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        return self.inner.forward_backward(data, self._known(loss_fn), None)

    def _known(self, loss_fn: str) -> str:
        return "cross_entropy" if loss_fn == "cross_entropy" else "importance_sampling"


class IgnoresTheConfig(Trainer):
    def forward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        return self.inner.forward(data, loss_fn, None)


class IgnoresTheWeights(Trainer):
    def forward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        return self.inner.forward(self._bare(data), loss_fn, None)

    def forward_backward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        return self.inner.forward_backward(self._bare(data), loss_fn, None)

    def _bare(self, data: Any) -> Any:
        keep = ("target_tokens", "logprobs", "advantages")
        return [
            tinker.Datum(
                model_input=datum.model_input,
                loss_fn_inputs={name: value for name, value in datum.loss_fn_inputs.items() if name in keep},
            )
            for datum in data
        ]


class KeepsItsValue(Trainer):
    async def forward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        output = await self.inner.forward(data, loss_fn, loss_fn_config)
        records = [{"logprobs": record["logprobs"]} for record in output.loss_fn_outputs]
        return tinker.ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=records, metrics={})


class TellsLossesOfTokens(KeepsItsValue):
    """Sound, but its total is not among the metrics."""

    async def forward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        output = await self.inner.forward(data, loss_fn, loss_fn_config)
        return tinker.ForwardBackwardOutput(
            loss_fn_output_type="", loss_fn_outputs=output.loss_fn_outputs, metrics={}
        )


class Refuses(Trainer):
    def forward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        if loss_fn not in ("cross_entropy", "importance_sampling"):
            raise ValueError(f"unknown loss {loss_fn}")
        return self.inner.forward(data, loss_fn, loss_fn_config)


class Hangs(Trainer):
    async def forward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        await asyncio.Event().wait()


class NeverLearns(Trainer):
    async def optim_step(self, params: Any) -> Any:
        return tinker.OptimStepResponse(metrics={})


class LearnsBackwards(Trainer):
    def forward_backward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        return self.inner.forward_backward([self._turned(datum) for datum in data], loss_fn, loss_fn_config)

    def _turned(self, datum: Any) -> Any:
        inputs = {
            name: tinker.TensorData.from_numpy(-value.to_numpy())
            if name in ("advantages", "weights")
            else value
            for name, value in datum.loss_fn_inputs.items()
        }
        return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


class Shuffles(Trainer):
    """Answers a batch in the order of the lengths."""

    async def forward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        ordered = sorted(data, key=lambda datum: datum.model_input.length)
        return await self.inner.forward(ordered, loss_fn, loss_fn_config)


class LeaksBetweenRows(Trainer):
    """What a datum is told depends on what else is in the batch."""

    async def forward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        output = await self.inner.forward(data, loss_fn, loss_fn_config)
        for record in output.loss_fn_outputs:
            shifted = record["logprobs"].to_numpy() - 0.01 * (len(data) - 1)
            record["logprobs"] = tinker.TensorData.from_numpy(shifted)
        return output


class KeepsTheLastGradient(Trainer):
    last: Any = None

    async def forward_backward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        self.last = (data, loss_fn, loss_fn_config)
        return await self.inner.forward(*self.last)

    async def optim_step(self, params: Any) -> Any:
        await self.inner.forward_backward(*self.last)
        return await self.inner.optim_step(params)


class KeepsTheFirstGradient(KeepsTheLastGradient):
    async def forward_backward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        self.last = self.last or (data, loss_fn, loss_fn_config)
        return await self.inner.forward(data, loss_fn, loss_fn_config)

    async def optim_step(self, params: Any) -> Any:
        response = await super().optim_step(params)
        self.last = None
        return response


class ForwardLeavesGradients(Trainer):
    def forward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        return self.inner.forward_backward(data, loss_fn, loss_fn_config)


class OwnLossesUpsideDown(Trainer):
    def forward_backward_custom(self, data: Any, loss_fn: Any) -> Any:
        def flipped(data: Any, logprobs: Any) -> Any:
            value, metrics = loss_fn(data, logprobs)
            return -value, metrics

        return self.inner.forward_backward_custom(data, flipped)


class OwnLossesPoison(Trainer):
    """A client that does nothing more after a loss of one's own has failed, as those of newer SDKs."""

    poisoned = False

    def forward_backward_custom(self, data: Any, loss_fn: Any) -> Any:
        self.poisoned = True
        raise RuntimeError("the engine has no cross_entropy")

    def forward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        if self.poisoned:
            raise RuntimeError("this client is poisoned")
        return self.inner.forward(data, loss_fn, loss_fn_config)


class StaleSamplers(Trainer):
    """Samplers have the weights of the beginning."""

    first: Any = None

    def save_weights_and_get_sampling_client(self) -> Any:
        self.first = self.first or self.inner.save_weights_and_get_sampling_client()
        return self.first


class LiveSamplers(Trainer):
    """Samplers follow every later step."""

    def save_weights_and_get_sampling_client(self) -> Any:
        trainer = self.inner

        class Live:
            def sample(self, *args: Any, **kwargs: Any) -> Any:
                return trainer.save_weights_and_get_sampling_client().sample(*args, **kwargs)

        return Live()


class SilentSampler(Sampler):
    """No logprobs."""

    async def answer(self, prompt: Any, num_samples: int, params: Any, options: dict[str, Any]) -> Any:
        response = await super().answer(prompt, num_samples, params, options)
        return make_response([replace(sequence, logprobs_np=None) for sequence in response.sequences], {})


class OneSample(Sampler):
    async def answer(self, prompt: Any, num_samples: int, params: Any, options: dict[str, Any]) -> Any:
        return await super().answer(prompt, 1, params, options)


class LongSamples(Sampler):
    async def answer(self, prompt: Any, num_samples: int, params: Any, options: dict[str, Any]) -> Any:
        longer = changed(params, max_tokens=params.max_tokens + 1)
        return await super().answer(prompt, num_samples, longer, options)


class OffLogprobs(Sampler):
    """Logprobs of another distribution than it draws from."""

    async def answer(self, prompt: Any, num_samples: int, params: Any, options: dict[str, Any]) -> Any:
        response = await super().answer(prompt, num_samples, params, options)
        return resampled(
            response, lambda tokens, logprobs, reason: (tokens, [x - 0.2 for x in logprobs], reason)
        )


class ShiftedPrompts(Sampler):
    """Logprobs of the prompt stand one place too early."""

    def places(self, told: Any) -> list[float]:
        return [np.nan, *told[2:], told[1]]

    async def answer(self, prompt: Any, num_samples: int, params: Any, options: dict[str, Any]) -> Any:
        response = await super().answer(prompt, num_samples, params, options)
        told = response.prompt_logprobs
        if told is None:
            return response
        places = np.array(self.places(told), dtype=np.float32)
        return make_response(list(response.sequences), {"prompt_logprobs_np": places})


class NoFirstPlace(ShiftedPrompts):
    """The first token of the prompt, which has no logprob, has no place either."""

    def places(self, told: Any) -> list[float]:
        return told[1:]


class FewAlternatives(Sampler):
    async def answer(self, prompt: Any, num_samples: int, params: Any, options: dict[str, Any]) -> Any:
        fewer = {name: value - 2 if name.startswith("topk") else value for name, value in options.items()}
        return await super().answer(prompt, num_samples, params, fewer)


class AlternativesOfAnother(Sampler):
    """Alternatives after a prompt without its second token."""

    async def answer(self, prompt: Any, num_samples: int, params: Any, options: dict[str, Any]) -> Any:
        if any(name.startswith("topk") for name in options):
            ints = prompt.to_ints()
            prompt = tinker.ModelInput.from_ints([ints[0], *ints[2:]])
        return await super().answer(prompt, num_samples, params, options)


class NoSeeds(Sampler):
    count = 100

    async def answer(self, prompt: Any, num_samples: int, params: Any, options: dict[str, Any]) -> Any:
        NoSeeds.count += 1
        return await super().answer(prompt, num_samples, changed(params, seed=NoSeeds.count), options)


class OneSeed(Sampler):
    async def answer(self, prompt: Any, num_samples: int, params: Any, options: dict[str, Any]) -> Any:
        return await super().answer(prompt, num_samples, changed(params, seed=7), options)


class Parrot(Sampler):
    """All samples of a request are the same."""

    async def answer(self, prompt: Any, num_samples: int, params: Any, options: dict[str, Any]) -> Any:
        response = await super().answer(prompt, 1, changed(params, temperature=1e-6), options)
        return make_response(list(response.sequences) * num_samples, {})


class NeverGreedy(Sampler):
    async def answer(self, prompt: Any, num_samples: int, params: Any, options: dict[str, Any]) -> Any:
        warmer = changed(params, temperature=params.temperature or 1.0)
        return await super().answer(prompt, num_samples, warmer, options)


class IgnoresTemperature(Sampler):
    async def answer(self, prompt: Any, num_samples: int, params: Any, options: dict[str, Any]) -> Any:
        return await super().answer(prompt, num_samples, changed(params, temperature=1.0), options)


class Untempered(Sampler):
    """Draws at the temperature, tells the logprobs of temperature 1."""

    async def answer(self, prompt: Any, num_samples: int, params: Any, options: dict[str, Any]) -> Any:
        response = await super().answer(prompt, num_samples, params, options)
        scored = [
            self.inner.compute_logprobs(tinker.ModelInput.from_ints([*prompt.to_ints(), *sequence.tokens]))
            for sequence in response.sequences
        ]
        told = iter([(await future)[prompt.length :] for future in scored])
        return resampled(response, lambda tokens, logprobs, reason: (tokens, next(told), reason))


class NeverStops(Sampler):
    async def answer(self, prompt: Any, num_samples: int, params: Any, options: dict[str, Any]) -> Any:
        return await super().answer(prompt, num_samples, changed(params, stop=[]), options)


class SwallowsTheStop(Sampler):
    """The token that ends a sample is not part of it."""

    async def answer(self, prompt: Any, num_samples: int, params: Any, options: dict[str, Any]) -> Any:
        response = await super().answer(prompt, num_samples, params, options)

        def cut(tokens: Any, logprobs: Any, reason: str) -> Any:
            return (tokens[:-1], logprobs[:-1], reason) if reason == "stop" else (tokens, logprobs, reason)

        return resampled(response, cut)


class ForgetsTheOptimiser(Wrapped):
    """A service that restores weights alone."""

    def create_training_client_from_state_with_optimizer(self, path: str) -> Any:
        return self.inner.create_training_client_from_state(path)


class ForgetsTheWeights(Wrapped):
    """A service that restores nothing."""

    model = ""

    def create_training_client_from_state_with_optimizer(self, path: str) -> Any:
        return self.inner.create_lora_training_client(self.model, rank=4, seed=0)


class OneSetOfWeights(Wrapped):
    """A service whose training clients are one."""

    made: Any = None

    def create_lora_training_client(self, base_model: str, **options: Any) -> Any:
        self.made = self.inner.create_lora_training_client(base_model, **options)
        return self.made

    def create_training_client_from_state(self, path: str) -> Any:
        return self.made


class OneFrozenCopy(Wrapped):
    """A service whose second training client never moves."""

    def create_training_client_from_state(self, path: str) -> Any:
        return NeverLearns(self.inner.create_training_client_from_state(path))


def with_sampler(sampler_class: type[Sampler]) -> type[Trainer]:
    return type(f"With{sampler_class.__name__}", (Trainer,), {"sampler_class": sampler_class})


def bench(service: Any, model: str, trainer_class: type[Trainer] = Trainer) -> Bench:
    """A bench of a fresh adapter, with the exactness of float32."""
    client = trainer_class(service.create_lora_training_client(model, rank=4, seed=0))
    return Bench(service=service, client=client, tolerance=1e-3)
