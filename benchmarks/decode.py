"""Processor time of one decode step, and of the prefill before it, on the local engine.

    python benchmarks/decode.py [steps=24] [precision=float32] [rows=1,12,32] [prompts=128,768] [threads=1]
        [model=PATH] [products=oneDNN,kernel] [groups=8]

A random Llama of 42 million weights (8 layers, 512 wide, 32,000 tokens, tied), or a model of at least as many tokens,
with a merged LoRA 16. ``products`` compares what multiplies by the weights; else the engine chooses.
``group`` is one prompt with all rows as its samples, ``distinct`` is a prompt for every row; with ``groups`` the rows
are also samples of so many prompts. Medians over the steps; with one thread processor time, so that other work on the
machine counts little, with more the clock's.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from _random_model import save_random_model

from viva.threads import prepare_threads

VOCAB = 32_000


def save_model(folder: str) -> None:
    from transformers import LlamaConfig

    save_random_model(
        LlamaConfig,
        folder,
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )


def measure(
    client: Any,
    rows: int,
    prompt: int,
    steps: int,
    groups: int,
    clock: Callable[[], float] = time.process_time,
) -> tuple[float, float]:
    """Seconds of the prefill, and the median of a decode step."""
    import tinker

    numbers = random.Random(rows * prompt)
    settings = tinker.SamplingParams(max_tokens=steps + 1, stop=[], seed=0)
    futures = []
    for _ in range(groups):
        tokens = [numbers.randrange(VOCAB) for _ in range(prompt)]
        futures.append(client.sample(tinker.ModelInput.from_ints(tokens), rows // groups, settings))
    decoder = client._source.result().decoder
    seconds: list[float] = []
    while decoder.has_work():
        start = clock()
        decoder.run_unit()
        seconds.append(clock() - start)
    for future in futures:
        future.result()
    return sum(seconds[:-steps]), statistics.median(seconds[-steps:])


def compare(
    trainer: Any, products: Sequence[str], measure_one: Callable[[Any], tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Medians of three tries by each kind of product, in turns."""
    from viva.engine import linear

    tries: dict[str, list[tuple[float, float]]] = {name: [] for name in products}
    chosen = linear.can_tile
    try:
        for _ in range(3):
            for name in products:
                linear.can_tile = (lambda _: False) if name == "oneDNN" else chosen
                tries[name].append(measure_one(trainer.save_weights_and_get_sampling_client()))
    finally:
        linear.can_tile = chosen
    return {name: tuple(map(statistics.median, zip(*found, strict=True))) for name, found in tries.items()}


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    steps = int(given.get("steps", "24"))
    prepare_threads()
    import torch

    from viva.engine import LocalServiceClient

    threads = int(given.get("threads", "1"))
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        if "model" not in given:
            save_model(folder)
        service = LocalServiceClient(device="cpu", precision=given.get("precision", "float32"))
        trainer = service.create_lora_training_client(given.get("model", folder), rank=16, seed=0)
        print("| rows | prompt | prompts | products | prefill, ms | decode step, ms | tokens per second |")
        print("|---|---|---|---|---|---|---|")
        for prompt in map(int, given.get("prompts", "128,768").split(",")):
            for rows in map(int, given.get("rows", "1,12,32").split(",")):
                wanted = {1, *map(int, given.get("groups", "1").split(",")), rows}
                for groups in sorted(number for number in wanted if rows % number == 0):
                    found = compare(
                        trainer,
                        given.get("products", "").split(","),
                        lambda client, r=rows, p=prompt, g=groups: measure(client, r, p, steps, g, clock),
                    )
                    kind = {rows: "distinct", 1: "group"}.get(groups, f"{groups} groups")
                    for name, (prefill, step) in found.items():
                        cells = f"{prefill * 1e3:.0f} | {step * 1e3:.1f} | {rows / step:.0f}"
                        print(f"| {rows} | {prompt} | {kind} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
