"""Time of drawing the tokens of one decode step, by number of rows, with all threads.

    python benchmarks/drawing.py

Random logits of 32,000 tokens, temperature 1. The least of three medians of twenty draws, since nothing but drawing is
wanted. Sources of another commit, named by ``PYTHONPATH``, show what it was there.
"""

import random
import statistics
import time

from viva.threads import prepare_threads

ROWS = (1, 12, 32, 64, 128)
VOCABULARY = 32_000


def measure(rows: int) -> float:
    """Seconds of one draw."""
    import torch
    from tinker import SamplingParams

    from viva.engine.sampling import draw_tokens

    logits = 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(0))
    numbers = [random.Random(row).random() for row in range(rows)]
    rules = [SamplingParams()] * rows
    medians: list[float] = []
    for _ in range(3):
        seconds: list[float] = []
        for _ in range(20):
            start = time.perf_counter()
            draw_tokens(logits, rules, numbers)
            seconds.append(time.perf_counter() - start)
        medians.append(statistics.median(seconds))
    return min(medians)


def main() -> None:
    prepare_threads()
    print("| rows | ms |")
    print("|---|---|")
    for rows in ROWS:
        print(f"| {rows} | {1e3 * measure(rows):.2f} |", flush=True)


if __name__ == "__main__":
    main()
