"""Decoding rows of several adapters in one batch, against one adapter's rows and against a batch for each adapter.

    python benchmarks/adapters.py [rows=16,32] [adapters=2,4,8] [rounds=5] [steps=12] [prompt=64] [model=random]

All ways decode the same number of rows: ``one`` adapter, merged into its copy of the weights; several in ``shared``
batches over the base's one copy; several in batches of their own that take turns (``turns``), each merged. The ways are
repeated in turns; given are medians over the rounds of a step of all rows, with one thread in processor time, and the
memory of the copies. The model is that of ``decode.py`` with LoRA 16, or with ``model=tiny`` the built-in policy.
"""

import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import Any

from decode import save_model

from viva.threads import prepare_threads


def step_seconds(clients: list[Any], rows: int, prompt: int, steps: int) -> float:
    """Median time of a step of all rows, split evenly over clients."""
    import tinker

    numbers = random.Random(rows)
    settings = tinker.SamplingParams(max_tokens=steps + 1, stop=[], seed=0)
    futures: list[Any] = []
    for row in range(rows):
        tokens = tinker.ModelInput.from_ints([numbers.randrange(100) for _ in range(prompt)])
        futures.append(clients[row % len(clients)].sample(tokens, 1, settings))
    decoders = list(
        {id(client._source.result().decoder): client._source.result().decoder for client in clients}.values()
    )
    for decoder in decoders:
        while decoder._pending:
            decoder.run_unit()
    seconds: list[float] = []
    while any(decoder.has_work() for decoder in decoders):
        start = time.process_time()
        for decoder in decoders:
            if decoder.has_work():
                decoder.run_unit()
        seconds.append(time.process_time() - start)
    for future in futures:
        future.result()
    for decoder in decoders:
        decoder.forget()
    return statistics.median(seconds)


def trained(service: Any, model: str, count: int) -> list[Any]:
    """Samplers of adapters that were each moved by a step."""
    import tinker

    samplers: list[Any] = []
    for seed in range(count):
        trainer = service.create_lora_training_client(model, rank=16, seed=seed)
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4 + seed]},
        )
        trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        samplers.append(trainer.save_weights_and_get_sampling_client())
    return samplers


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    rounds, steps, prompt = (
        int(given.get(name, default))
        for name, default in (("rounds", "5"), ("steps", "12"), ("prompt", "64"))
    )
    counts = [int(count) for count in given.get("adapters", "2,4,8").split(",")]
    prepare_threads()
    import torch

    from viva.engine import EngineLimits, LocalServiceClient
    from viva.tiny import model_path

    torch.set_num_threads(1)
    with ExitStack() as contexts:
        if given.get("model") == "tiny":
            model = str(model_path())
        else:
            model = contexts.enter_context(tempfile.TemporaryDirectory())
            save_model(model)
        limits = EngineLimits(merged_models=max(counts))
        shared, apart = (
            trained(LocalServiceClient(device="cpu", limits=limits, shared_batch=each), model, max(counts))
            for each in (True, False)
        )
        print("| rows | adapters | one, ms | shared, ms | turns, ms | shared / one | turns / shared |")
        print("|---|---|---|---|---|---|---|")
        for rows in map(int, given.get("rows", "16,32").split(",")):
            for count in [1, *counts]:
                ways = {"one": apart[:1], "shared": shared[:count], "turns": apart[:count]}
                times: dict[str, list[float]] = {name: [] for name in ways}
                for number in range(rounds + 1):
                    for name, clients in ways.items():
                        taken = step_seconds(clients, rows, prompt, steps)
                        if number:
                            times[name].append(taken)
                one, both, turns = (statistics.median(times[name]) * 1e3 for name in ways)
                figures = f"{one:.1f} | {both:.1f} | {turns:.1f} | {both / one:.2f} | {turns / both:.2f}"
                print(f"| {rows} | {count} | {figures} |", flush=True)
        kept = [len(samplers[0]._core._copies) for samplers in (shared, apart)]
        print(f"\ncopies of the weights: {kept[0]} shared, {kept[1]} in turns")


if __name__ == "__main__":
    main()
