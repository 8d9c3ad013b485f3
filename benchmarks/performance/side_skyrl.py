"""SkyRL's JAX backend in this process: a policy-gradient step without its server, its database and its checkpoints.

Settings: ``model`` (folder), ``size``, ``shape`` and ``micro_batch``, the rows that are trained at once. Room is made
for one adapter of our rank only; by default it holds 32 of rank 32.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from channel import serve
from work import LEARNING_RATE, LORA_ALPHA, LORA_RANK, SHAPES, advantages, prompts

POLICY = "policy"


def sample_batch(types: Any, asked: list[list[int]], max_tokens: int, seed: int) -> Any:
    count = len(asked)
    return types.PreparedSampleBatch(
        all_model_inputs=[as_input(types, each) for each in asked],
        all_sampling_params=[
            types.SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=seed + index)
            for index in range(count)
        ],
        all_model_ids=[POLICY] * count,
        all_checkpoint_ids=["live"] * count,
        all_checkpoint_paths=[""] * count,
        all_session_ids=[None] * count,
        needs_prompt_logprobs=False,
        request_batch_slices=[("rollouts", POLICY, 0, count, False)],
    )


def training_batch(types: Any, asked: list[list[int]], sequences: list[Any]) -> Any:
    rows = []
    for prompt, sequence, advantage in zip(asked, sequences, advantages(len(asked)), strict=True):
        tokens, context = [*prompt, *sequence.tokens], len(prompt) - 1
        rows.append(
            (
                as_input(types, tokens[:-1]),
                tokens[1:],
                [0.0] * context + [1.0] * len(sequence.tokens),
                [0.0] * context + list(sequence.logprobs),
                [0.0] * context + [advantage] * len(sequence.tokens),
            )
        )
    inputs, targets, weights, logprobs, by_token = map(list, zip(*rows, strict=True))
    return types.PreparedModelPassBatch(
        all_model_inputs=inputs,
        all_targets=targets,
        all_token_weights=weights,
        all_sampling_logprobs=logprobs,
        all_advantages=by_token,
        all_values=[[] for _ in rows],
        all_returns=[[] for _ in rows],
        all_model_ids=[POLICY] * len(rows),
        all_loss_fns=["importance_sampling"] * len(rows),
        all_loss_fn_configs=[None] * len(rows),
        request_batch_slices=[("update", POLICY, 0, len(rows))],
    )


def as_input(types: Any, tokens: list[int]) -> Any:
    return types.ModelInput(chunks=[types.EncodedTextChunk(tokens=tokens)])


def make(settings: Mapping[str, Any]) -> Callable[[int], dict[str, float]]:
    from skyrl.backends.jax import JaxBackend, JaxBackendConfig
    from skyrl.tinker import types

    config = JaxBackendConfig(
        max_lora_adapters=2, max_lora_rank=LORA_RANK, train_micro_batch_size=settings["micro_batch"]
    )
    backend = JaxBackend(settings["model"], config)
    backend.create_model(POLICY, types.LoraConfig(rank=LORA_RANK, alpha=LORA_ALPHA, seed=0))
    backend.models[POLICY].loaded_checkpoint_id = "live"  # samples from the weights that it trains
    adam = types.AdamParams(learning_rate=LEARNING_RATE, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)
    shape, folder = SHAPES[settings["shape"]], settings["model"]

    def step(number: int) -> dict[str, float]:
        asked = [prompt for prompt in prompts(folder, shape, number) for _ in range(shape.group)]
        started = time.perf_counter()
        sampled = backend.sample(sample_batch(types, asked, shape.completion, number))["rollouts"]
        rolled = time.perf_counter()
        backend.forward_backward(training_batch(types, asked, sampled.sequences))
        backend.optim_step(POLICY, types.OptimStepInput(adam_params=adam))
        ended = time.perf_counter()
        tokens = sum(len(sequence.tokens) for sequence in sampled.sequences)
        return {
            "cost": ended - started,
            "rollouts": rolled - started,
            "update": ended - rolled,
            "tokens": tokens,
        }

    return step


if __name__ == "__main__":
    serve(make, ("skyrl", "jax", "jaxlib", "flax"))
