"""A decode step with fused layers by one with the layers of ``transformers``, on the local engine.

    python benchmarks/fused_layers.py [precision=float32] [rows=1,12,48] [prompts=20,768]

The model of ``decode.py``. Both are decoded in turns within one process, ten times forty steps each, with all threads;
the ratio is the median of the turns' own ratios of medians. Below 1 means that fused layers are faster.
"""

import statistics
import sys
import tempfile
import time
from typing import Any

from decode import measure, save_model

from viva.threads import prepare_threads

TURNS, STEPS = 10, 40


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    prepare_threads()
    from viva.engine import LocalServiceClient, core

    fuse = core.fuse_layers
    ways: dict[str, Any] = {"fused": fuse, "stock": lambda module: module}
    clients: dict[str, Any] = {}
    print("| rows | prompt | fused, ms | stock, ms | ratio |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for name, way in ways.items():
            core.fuse_layers = way  # the weights are merged, and the layers replaced, at the first step
            service = LocalServiceClient(device="cpu", precision=given.get("precision", "float32"))
            trainer = service.create_lora_training_client(folder, rank=16, seed=0)
            clients[name] = trainer.save_weights_and_get_sampling_client()
            measure(clients[name], 2, 20, 1, 1)
        for prompt in map(int, given.get("prompts", "20,768").split(",")):
            for rows in map(int, given.get("rows", "1,12,48").split(",")):
                found: dict[str, list[float]] = {name: [] for name in ways}
                for _ in range(TURNS):
                    for name, client in clients.items():
                        core.fuse_layers = ways[name]
                        _, step = measure(client, rows, prompt, STEPS, 1, time.perf_counter)
                        found[name].append(step)
                ratios = [ours / theirs for ours, theirs in zip(found["fused"], found["stock"], strict=True)]
                fused, stock = (1e3 * statistics.median(found[name]) for name in ways)
                ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                print(f"| {rows} | {prompt} | {fused:.1f} | {stock:.1f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
