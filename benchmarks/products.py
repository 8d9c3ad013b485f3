"""Products of rows with weights: torch's own, oneDNN's with the weight as it lies and with a packed one, our kernel's.

    python benchmarks/products.py [precision=float32] [rows=1,12,32,256,1344,3072]

Our kernel, where it can multiply, takes the place of oneDNN's packed product in a decode copy.

GFLOP/s with all threads, medians of seven tries in turns; weights are transposed views in every second line. Eight
weights of each shape are used one after another, so that few wait in a cache.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from viva.threads import prepare_threads

SHAPES = ((512, 512), (512, 1536), (1536, 512), (512, 32000))
"""Inputs and outputs."""
WEIGHTS, TRIES = 8, 7


def median_seconds(work: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of each way; they take turns, after one turn to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(TRIES + 1):
        for name, act in work.items():
            start = time.perf_counter()
            act()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    prepare_threads()
    import torch

    from viva.engine.linear import PackedLinear, TiledLinear, can_tile, product

    dtype = getattr(torch, given.get("precision", "float32"))
    print(
        "| rows | inputs | outputs | weight | torch | oneDNN | packed | kernel |\n|---|---|---|---|---|---|---|---|"
    )
    for rows in map(int, given.get("rows", "1,12,32,256,1344,3072").split(",")):
        for into, out in SHAPES:
            values = torch.rand(rows, into).to(dtype)
            for layout, shape in (("plain", (out, into)), ("transposed", (into, out))):
                made = [torch.rand(shape).to(dtype) for _ in range(WEIGHTS)]
                weights = made if layout == "plain" else [weight.T for weight in made]
                packed = [PackedLinear(weight.contiguous(), None) for weight in weights]
                ways: dict[str, Callable[[], Any]] = {
                    "torch": lambda x=values, w=weights: [torch.nn.functional.linear(x, one) for one in w],
                    "oneDNN": lambda x=values, w=weights: [product(x, one) for one in w],
                    "packed": lambda x=values, w=packed: [one(x) for one in w],
                }
                if can_tile(weights[0]):
                    tiles = [TiledLinear(weight.contiguous(), None) for weight in weights]
                    ways["kernel"] = lambda x=values, w=tiles: [one(x) for one in w]
                with torch.inference_mode():
                    found = median_seconds(ways)
                rates = [2e-9 * rows * into * out * WEIGHTS / each for each in found.values()]
                cells = " | ".join([f"{rate:.0f}" for rate in rates] + [""] * (4 - len(rates)))
                print(f"| {rows} | {into} | {out} | {layout} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
