"""One ``forward_backward`` by prefix trees and by padded rows: tokens computed and processor time.

    python benchmarks/tree_training.py [repeats=5]

A random model of the built-in policy's kind (4 layers, 256 wide, 704 tokens) with LoRA 16, float32, one thread. Both
ways are measured in turn; the ratio is the median of the ratios of neighbours. Processor time, so that other work on
the machine counts little.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from _random_model import save_random_model

from viva.threads import prepare_threads

VOCAB = 704


def save_model(folder: str) -> None:
    from transformers import Qwen3Config

    save_random_model(
        Qwen3Config,
        folder,
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
    )


def datum(context: list[int], action: list[int]) -> Any:
    """An action behind a context that carries no loss."""
    import tinker

    tokens = context + action
    num_context = len(context) - 1
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [-6.0] * (len(tokens) - 1),
            "advantages": [0.0] * num_context + [1.0] * len(action),
        },
    )


def conversation(text: Callable[[int], list[int]]) -> list[Any]:
    """Twelve turns of 48 tokens: each prompt is 60 shared tokens, the turns so far and 16 tokens of its own."""
    data: list[Any] = []
    transcript = text(60)
    for _ in range(12):
        turn = text(48)
        data.append(datum(transcript + text(16), turn))
        transcript = transcript + turn
    return data


def group(text: Callable[[int], list[int]], prompt: int, completion: int, size: int) -> list[Any]:
    """Completions of one prompt."""
    shared = text(prompt)
    return [datum(shared, text(completion)) for _ in range(size)]


def measure(client: Any, data: list[Any], repeats: int) -> list[str]:
    """Cells of one row of the table."""
    policy = client._policy

    def once(trees: bool) -> tuple[float, float]:
        policy.base = replace(policy.base, takes_trees=trees)
        start = time.process_time()
        metrics = client.forward_backward(data, "importance_sampling").result().metrics
        return time.process_time() - start, metrics["tree_token_ratio"]

    once(True)
    pairs = [(once(True), once(False)) for _ in range(repeats)]
    given = sum(each.model_input.length for each in data)
    (_, by_trees), (_, by_rows) = pairs[0]
    seconds = [statistics.median(pair[way][0] for pair in pairs) for way in (0, 1)]
    ratio = statistics.median(rows[0] / trees[0] for trees, rows in pairs)
    return [
        f"{given:,}",
        *(f"{share * given:,.0f}" for share in (by_rows, by_trees)),
        *(f"{second:.2f}" for second in reversed(seconds)),
        f"{ratio:.1f}",
    ]


def main() -> None:
    repeats = int(dict(argument.split("=", 1) for argument in sys.argv[1:]).get("repeats", "5"))
    prepare_threads()
    import torch

    from viva.engine import LocalServiceClient

    torch.set_num_threads(1)
    random_numbers = random.Random(0)

    def text(size: int) -> list[int]:
        return [random_numbers.randrange(VOCAB) for _ in range(size)]

    works = {
        "conversation of 12 turns": conversation(text),
        "128 / 128 / 12": group(text, 128, 128, 12),
        "64 / 8 / 64": group(text, 64, 8, 64),
        "20 / 12 / 8": group(text, 20, 12, 8),
        "24 strangers of 60": [datum(text(1), text(60)) for _ in range(24)],
    }
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        client = LocalServiceClient(device="cpu").create_lora_training_client(folder, rank=16, seed=0)
        print(
            "| data (prompt / completion / group) | tokens | by rows | by trees | s rows | s trees | ratio |"
        )
        print("|---|---|---|---|---|---|---|")
        for name, data in works.items():
            print("|", " | ".join([name, *measure(client, data, repeats)]), "|", flush=True)


if __name__ == "__main__":
    main()
