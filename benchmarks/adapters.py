"""Decoding rows of several adapters in one batch, against one adapter's rows and against a batch for each adapter.

    python benchmarks/adapters.py [model=random] [ranks=16] [rows=16,32] [adapters=1,2,4,8] [turns=on] [rounds=5]
        [steps=12] [prompt=64]

All ways decode the same number of rows: ``one`` adapter, merged into its copy of the weights; several in ``shared``
batches over the base's one copy; several in batches of their own that take ``turns``, each merged, which ``turns=off``
leaves out: they take the memory of a model each. The ways are repeated in turns; given are medians over the rounds of a
step of all rows, with one thread in processor time. Beside ``shared / one`` stands what it would be if a step took
nothing but the reading of weights: 1 and the adapters' numbers relative to the base's. The model is that of
``decode.py``, or the built-in policy (``tiny``), SmolLM2-135M-Instruct by ``make models`` (``smollm2``), or a folder.
Rows of the adapters alternate.
"""

import gc
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


def medians(ways: dict[str, list[Any]], rows: int, prompt: int, steps: int, rounds: int) -> dict[str, float]:
    """Time of a step of each way; they take turns, after one turn to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, clients in ways.items():
            taken = step_seconds(clients, rows, prompt, steps)
            if turn:
                seconds[name].append(taken)
    return {name: statistics.median(each) for name, each in seconds.items()}


def trained(service: Any, model: str, count: int, rank: int) -> list[Any]:
    """Samplers of adapters that were each moved by a step."""
    import tinker

    samplers: list[Any] = []
    for seed in range(count):
        trainer = service.create_lora_training_client(model, rank=rank, seed=seed)
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4 + seed]},
        )
        trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        samplers.append(trainer.save_weights_and_get_sampling_client())
    return samplers


def share(sampler: Any) -> float:
    """Numbers of an adapter relative to those of the layers that it adapts."""
    tensors = sampler._source.result().adapter.tensors
    down = {name.removesuffix(".lora_A"): each for name, each in tensors.items() if name.endswith(".lora_A")}
    base = sum(each.shape[1] * len(tensors[f"{name}.lora_B"]) for name, each in down.items())
    return sum(each.numel() for each in tensors.values()) / base


def model_named(name: str, contexts: ExitStack) -> str:
    """The folder or file of a model."""
    from viva.recipes import demo
    from viva.tiny import model_path

    if name == "random":
        folder = contexts.enter_context(tempfile.TemporaryDirectory())
        save_model(folder)
        return folder
    return str({"tiny": model_path(), "smollm2": demo.model_path()}.get(name, name))


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    rounds, steps, prompt = (
        int(given.get(name, default))
        for name, default in (("rounds", "5"), ("steps", "12"), ("prompt", "64"))
    )
    counts = [int(count) for count in given.get("adapters", "1,2,4,8").split(",")]
    with_turns = given.get("turns", "on") == "on"
    prepare_threads()
    import torch

    from viva.engine import EngineLimits, LocalServiceClient

    torch.set_num_threads(1)
    print("| rank | rows | adapters | one, ms | shared, ms | shared / one | by bytes | turns / shared |")
    print("|---|---|---|---|---|---|---|---|")
    with ExitStack() as contexts:
        model = model_named(given.get("model", "random"), contexts)
        limits = EngineLimits(merged_models=max(counts))
        for rank in map(int, given.get("ranks", "16").split(",")):
            shared, apart = (
                trained(
                    LocalServiceClient(device="cpu", limits=limits, shared_batch=is_shared), model, many, rank
                )
                for is_shared, many in ((True, max(counts)), (False, max(counts) if with_turns else 1))
            )
            for rows in map(int, given.get("rows", "16,32").split(",")):
                ways = {"one": apart[:1]}
                ways |= {f"shared {count}": shared[:count] for count in counts}
                ways |= {f"turns {count}": apart[:count] for count in counts if with_turns}
                seconds = medians(ways, rows, prompt, steps, rounds)
                one = seconds["one"]
                for count in counts:
                    both, turns = seconds[f"shared {count}"], seconds.get(f"turns {count}")
                    figures = f"{one * 1e3:.1f} | {both * 1e3:.1f} | {both / one:.2f}"
                    figures += (
                        f" | {1 + count * share(shared[0]):.2f} | {f'{turns / both:.2f}' if turns else ''}"
                    )
                    print(f"| {rank} | {rows} | {count} | {figures} |", flush=True)
            del shared, apart
            gc.collect()


if __name__ == "__main__":
    main()
