"""Viva's local engine: a policy-gradient step, ragged rollouts, judging. Only the public clients are used.

Settings: ``work`` (``step``, ``batches``, ``ragged`` or ``judge``), ``model`` (folder), ``size``, ``precision``, and
what the work takes.
"""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from channel import serve
from work import LEARNING_RATE, LORA_RANK, SHAPES, advantages, batches, prompts, tail, words

from viva.threads import prepare_threads

BURN = "import torch\na = torch.rand(1024, 1024)\nwhile True: a @ a"


def open_client(settings: Mapping[str, Any]) -> Any:
    from viva.engine import LocalServiceClient

    service = LocalServiceClient(device=settings.get("device", "cpu"), precision=settings["precision"])
    return service.create_lora_training_client(settings["model"], rank=LORA_RANK, seed=0)


def policy_datum(
    prompt: Sequence[int], reply: Sequence[int], logprobs: Sequence[float], advantage: float
) -> Any:
    import tinker

    context = len(prompt) - 1
    tokens = [*prompt, *reply]
    mask = np.array([0.0] * context + [1.0] * len(reply), np.float32)  # as the loop sends it
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * context + list(logprobs),
            "advantages": [0.0] * context + [advantage] * len(reply),
            "mask": mask,
        },
    )


def policy_step(settings: Mapping[str, Any]) -> Callable[[int], dict[str, float]]:
    """Rollouts, update and a new sampler; settings ``shape`` and ``busy`` (a second process computes meanwhile)."""
    import tinker

    client = open_client(settings)
    shape, folder = SHAPES[settings["shape"]], settings["model"]

    def step(number: int) -> dict[str, float]:
        params = tinker.SamplingParams(max_tokens=shape.completion, stop=[], seed=number)
        asked = prompts(folder, shape, number)
        started = time.perf_counter()
        sampler = client.save_weights_and_get_sampling_client()
        futures = [sampler.sample(tinker.ModelInput.from_ints(each), shape.group, params) for each in asked]
        sampled = [
            (each, one)
            for each, future in zip(asked, futures, strict=True)
            for one in future.result().sequences
        ]
        rolled = time.perf_counter()
        data = [
            policy_datum(prompt, sequence.tokens, sequence.logprobs, advantage)
            for (prompt, sequence), advantage in zip(sampled, advantages(shape.rows), strict=True)
        ]
        done = client.forward_backward(data, "importance_sampling")
        client.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATE)).result()
        ended = time.perf_counter()
        tokens = sum(len(sequence.tokens) for _, sequence in sampled)
        assert tokens == shape.rows * shape.completion
        return {
            "cost": ended - started,
            "rollouts": rolled - started,
            "update": ended - rolled,
            "token_ratio": done.result().metrics["tree_token_ratio"],
        }

    if not settings.get("busy"):
        return step

    def beside(number: int) -> dict[str, float]:
        with busy_process():
            return step(number)

    return beside


@contextmanager
def busy_process() -> Iterator[None]:
    """A process that multiplies matrices on as many threads as this one."""
    with subprocess.Popen([sys.executable, "-c", BURN]) as process:
        time.sleep(3)  # it has loaded torch by then
        try:
            yield
        finally:
            process.kill()


def ragged(settings: Mapping[str, Any]) -> Callable[[int], dict[str, float]]:
    """Groups of samples that end at one of many stop tokens; cost is in milliseconds by token."""
    import tinker

    client = open_client(settings)
    ids = words(settings["model"])
    stop = ids[:: settings["stop_every"]]

    def step(number: int) -> dict[str, float]:
        rng = random.Random(number)
        lengths = settings["prompts"] if number else settings["prompts"][:4]  # the latter to warm up
        asked = [tail(ids, length, rng) for length in lengths]
        params = tinker.SamplingParams(max_tokens=settings["max_tokens"], stop=list(stop), seed=number)
        sampler = client.save_weights_and_get_sampling_client()
        started = time.perf_counter()
        futures = [
            sampler.sample(tinker.ModelInput.from_ints(each), settings["group"], params) for each in asked
        ]
        tokens = sum(len(one.tokens) for future in futures for one in future.result().sequences)
        seconds = time.perf_counter() - started
        return {"cost": 1000 * seconds / tokens, "seconds": seconds, "tokens": tokens}

    return step


def judge(settings: Mapping[str, Any]) -> Callable[[int], dict[str, float]]:
    """Verdict probabilities of pairs behind one transcript; with ``warm``, its beginning has been sampled from."""
    import tinker

    client = open_client(settings)
    ids = words(settings["model"])
    params = tinker.SamplingParams(max_tokens=1, seed=0)

    def step(number: int) -> dict[str, float]:
        rng = random.Random(number)
        transcript = tail(ids, settings["transcript"], rng)
        asked = [transcript + tail(ids, settings["suffix"], rng) for _ in range(settings["pairs"])]
        sampler = client.save_weights_and_get_sampling_client()
        sampler.result()
        if settings["warm"]:
            sampler.sample(tinker.ModelInput.from_ints(transcript), 1, params).result()
        started = time.perf_counter()
        futures = [
            sampler.sample(tinker.ModelInput.from_ints(each), 1, params, topk_sample_logprobs=20)
            for each in asked
        ]
        rows = [future.result().sequences[0].topk_logprobs[0] for future in futures]
        assert all(len(row) == 20 for row in rows)
        return {"cost": time.perf_counter() - started}

    return step


def fresh_batches(settings: Mapping[str, Any]) -> Callable[[int], dict[str, float]]:
    """Samples right after an update, which is not timed; a batch begins with a new sampler."""
    import tinker

    client, ids = open_client(settings), words(settings["model"])

    def update(rng: random.Random) -> None:
        prompt, reply = tail(ids, 8, rng), tail(ids, 8, rng)
        inputs = {
            "target_tokens": [*prompt, *reply][1:],
            "weights": np.array([0.0] * 7 + [1.0] * 8, np.float32),
        }
        tokens = tinker.ModelInput.from_ints([*prompt, *reply][:-1])
        client.forward_backward([tinker.Datum(model_input=tokens, loss_fn_inputs=inputs)], "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATE)).result()

    def step(number: int) -> dict[str, float]:
        def sample(
            asked: list[list[int]], samples: int, new: int, rng: random.Random
        ) -> tuple[int, float, float]:
            update(rng)
            params = tinker.SamplingParams(max_tokens=new, stop=[], seed=number)
            started = time.perf_counter()
            sampler = client.save_weights_and_get_sampling_client().result()
            refreshed = time.perf_counter()
            futures = [sampler.sample(tinker.ModelInput.from_ints(each), samples, params) for each in asked]
            tokens = sum(len(one.tokens) for future in futures for one in future.result().sequences)
            ended = time.perf_counter()
            return tokens, ended - started, refreshed - started

        return batches(settings, number, sample)

    return step


WORKS = {"step": policy_step, "batches": fresh_batches, "ragged": ragged, "judge": judge}

if __name__ == "__main__":
    prepare_threads()
    serve(lambda settings: WORKS[settings["work"]](settings), ("torch", "transformers", "peft", "tinker"))
