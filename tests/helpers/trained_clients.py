"""Training clients of tiny models, trained a little."""

from typing import Any

import tinker
import torch
from tiny_engine import ints, supervised, train, weights

from viva.engine import LocalServiceClient, LocalTrainingClient

TEXTS = [list(b"The answer is 42."), list(b"No, it is 7, because 3 + 4 = 7.")]
STEP = tinker.AdamParams(learning_rate=0.02, weight_decay=0.01)


def make(service: LocalServiceClient, folder: str, rank: int = 4) -> LocalTrainingClient:
    """A client that was trained on the texts once."""
    trainer = service.create_lora_training_client(folder, rank=rank, seed=0, user_metadata={"run": "a"})
    train(trainer, TEXTS, learning_rate=0.03 if rank else 0.003)
    return trainer


def scores(client: Any, text: list[int] = TEXTS[0]) -> list[float | None]:
    """Logprobs of a text."""
    return client.compute_logprobs(ints(text)).result()


def go_on(client: LocalTrainingClient, steps: int = 2) -> dict[str, torch.Tensor]:
    """Train on the texts; returns the weights."""
    for _ in range(steps):
        client.forward_backward([supervised(text) for text in TEXTS], "cross_entropy")
        client.optim_step(STEP).result()
    return weights(client)
