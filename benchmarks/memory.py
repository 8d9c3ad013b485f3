"""Peak memory and processor time of sampling and of an update, on SmolLM2-135M-Instruct (``make models``).

    python benchmarks/memory.py rows [prompts=8] [samples=32] [words=300] [batches=2]
    python benchmarks/memory.py update [prompts=10] [samples=8] [steps=2] [training_tokens=4096] [model_name=tiny]
    python benchmarks/memory.py refresh [refreshes=3]
    python benchmarks/memory.py conversations [conversations=1000] [agents=3] [rounds=2] [tokens=24]

`rows`: prompts of random words, some tokens longer than `words`, with samples of 48 tokens at temperature 0.8.
`update`: steps of `importance_sampling` on prompts of 60 random tokens with samples of 40, LoRA rank 32.
`refresh`: one token from the weights of a moment, so that their decode copy is made, of LoRA rank 32; the sampling
client before is gone by then, as in a run.
`conversations`: a debate on each of so many one-line questions, all of them begun at once, without judge and update.
A command measures the code that comes first on the path, so PYTHONPATH compares commits; give both the same
OMP_NUM_THREADS.
"""

import asyncio
import random
import resource
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from viva.recipes.common import resolve_model
from viva.recipes.demo import model_path
from viva.threads import prepare_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    import tinker

TEXT = "the cat sat on a mat while seven green birds sang about numbers and rivers"


def told(name: str, wall: float, processor: float) -> None:
    """Print the time since two earlier readings, and the peak of memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    spent = time.perf_counter() - wall, time.process_time() - processor
    print(f"{name}: {spent[0]:.1f} s, {spent[1]:.1f} s of processor time; peak {peak:,.0f} MiB", flush=True)


def random_prompts(
    rng: random.Random, encode: "Callable[[str], list[int]]", *, prompts: int, words: int
) -> "list[tinker.ModelInput]":
    """Prompts of so many random words."""
    import tinker

    texts = [" ".join(rng.choices(TEXT.split(), k=words)) for _ in range(prompts)]
    return [tinker.ModelInput.from_ints(encode(text)) for text in texts]


def rows(model: str, *, prompts: int = 8, samples: int = 32, words: int = 300, batches: int = 2) -> None:
    """Sample from prompts that a group shares."""
    import tinker

    from viva.engine import LocalServiceClient

    sampler = LocalServiceClient().create_sampling_client(base_model=model)
    encode, rng = sampler.get_tokenizer().encode, random.Random(0)
    for batch in range(batches):
        asked = random_prompts(rng, encode, prompts=prompts, words=words)
        wall, processor = time.perf_counter(), time.process_time()
        params = tinker.SamplingParams(max_tokens=48, temperature=0.8, seed=batch)
        for future in [sampler.sample(each, samples, params) for each in asked]:
            future.result()
        told(f"batch {batch}", wall, processor)


def training_data(
    highest: int, *, prompts: int, samples: int, prompt_tokens: int = 60, reply_tokens: int = 40
) -> "list[tinker.Datum]":
    """Groups of samples of random tokens below `highest`, all with advantage 1."""
    import tinker

    rng, data = random.Random(0), []
    for _ in range(prompts):
        prompt = [rng.randrange(5, highest) for _ in range(prompt_tokens)]
        for _ in range(samples):
            text = prompt + [rng.randrange(5, highest) for _ in range(reply_tokens)]
            size = len(text) - 1
            advantages = [0.0] * (prompt_tokens - 1) + [1.0] * reply_tokens
            given = {
                name: tinker.TensorData(data=values, dtype="float32", shape=[size])
                for name, values in {"logprobs": [-9.0] * size, "advantages": advantages}.items()
            }
            given["target_tokens"] = tinker.TensorData(data=text[1:], dtype="int64", shape=[size])
            data.append(
                tinker.Datum(model_input=tinker.ModelInput.from_ints(text[:-1]), loss_fn_inputs=given)
            )
    return data


def update(
    model: str, *, prompts: int = 10, samples: int = 8, steps: int = 2, training_tokens: int = 4096
) -> None:
    """Train on groups of samples."""
    import tinker

    from viva.engine import EngineLimits, LocalServiceClient

    limits = replace(EngineLimits(), training_tokens=training_tokens)
    trainer = LocalServiceClient(limits=limits).create_lora_training_client(base_model=model, rank=32)
    highest = min(20_000, len(trainer.get_tokenizer()))
    data = training_data(highest, prompts=prompts, samples=samples)
    for step in range(steps):
        wall, processor = time.perf_counter(), time.process_time()
        trainer.forward_backward(data, "importance_sampling").result()
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
        told(f"step {step}", wall, processor)


def refresh(model: str, *, refreshes: int = 3) -> None:
    """Sample a token from new weights, time and again."""
    import tinker

    from viva.engine import LocalServiceClient

    trainer = LocalServiceClient().create_lora_training_client(base_model=model, rank=32)
    asked = tinker.ModelInput.from_ints(trainer.get_tokenizer().encode("What is 3 + 4?"))
    told("loaded", time.perf_counter(), time.process_time())
    for number in range(refreshes):
        sampler = trainer.save_weights_and_get_sampling_client()
        wall, processor = time.perf_counter(), time.process_time()
        sampler.sample(asked, 1, tinker.SamplingParams(max_tokens=1, temperature=1.0)).result()
        told(f"refresh {number}", wall, processor)


def conversations(
    model: str, *, conversations: int = 1000, agents: int = 3, rounds: int = 2, tokens: int = 24
) -> None:
    """Play debates, all at once."""
    from viva import Protocol, Round
    from viva.conversation.rendering import load_renderer
    from viva.engine import LocalServiceClient
    from viva.rewards import find_reward
    from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
    from viva.training.rollouts import run_groups
    from viva.training.sampling import Sampling, SeatSampler

    sampler = LocalServiceClient().create_sampling_client(base_model=model)
    renderer = load_renderer(sampler.get_tokenizer(), model_name=model)
    names = [f"argue_{number}" for number in range(rounds)]
    debate = Protocol(
        rounds=[Round(name, "Argue for your answer.", names[:number]) for number, name in enumerate(names)],
        reward=lambda conversation: {agent: float(agent) for agent in range(agents)},
        on_failure="continue",
    )
    rng = random.Random(0)
    builders = [
        MultiAgentConversationEnvGroupBuilder(
            question=f"What is {rng.randrange(1000)} + {rng.randrange(1000)}?",
            renderer=renderer,
            protocol=debate,
            reward=find_reward(debate.reward),
            num_agents=agents,
            seed=number,
        )
        for number in range(conversations)
    ]
    told("before", time.perf_counter(), time.process_time())
    wall, processor = time.perf_counter(), time.process_time()
    policy = SeatSampler(sampler=sampler, sampling=Sampling(seed=0, max_tokens=tokens, temperature=0.8))
    outcomes = asyncio.run(run_groups(builders, policy, max_retries=0))
    told(f"{sum(each.group is not None for each in outcomes)} conversations", wall, processor)


def main(argv: list[str]) -> None:
    """Measure what is asked for."""
    prepare_threads()  # before torch is imported
    measures = {"rows": rows, "update": update, "refresh": refresh, "conversations": conversations}
    if not argv or argv[0] not in measures:
        sys.exit(f"name one of {', '.join(measures)}")
    given = dict(each.split("=", 1) for each in argv[1:])
    model = resolve_model(given.pop("model_name", str(model_path())))
    measures[argv[0]](model, **{name: int(value) for name, value in given.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
