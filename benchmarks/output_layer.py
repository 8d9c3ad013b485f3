"""Which share of an update does the output layer take, and which of it could a fused kernel save?

    python benchmarks/output_layer.py

SmolLM2-135M-Instruct (``make models``, 49,152 words), float32, the groups of ``benchmarks/memory.py update``: 80
samples of 40 tokens. *Products* are those with the output layer's weight, forward and backward to the hidden states;
*between* is what `viva.engine.losses` does with the logits: log-probabilities of the targets and their gradient, put
in their place. A kernel that never writes the logits can save no more than *between*. Medians of tries in turns.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from memory import training_data
from products import median_seconds

from viva.recipes.demo import model_path
from viva.threads import prepare_threads

PROMPTS, SAMPLES, REPLY = 10, 8, 40


def main() -> None:
    """Print the table."""
    prepare_threads()
    import torch

    from viva.engine import LocalServiceClient
    from viva.engine.linear import product
    from viva.engine.losses import rows_at_once, target_logprobs

    trainer = LocalServiceClient().create_lora_training_client(base_model=str(model_path()), rank=32)
    vocab = len(trainer.get_tokenizer())
    data = training_data(min(20_000, vocab), prompts=PROMPTS, samples=SAMPLES, reply_tokens=REPLY)
    read = PROMPTS * SAMPLES * REPLY
    rows = rows_at_once(vocab, max_logits=2**30)
    head = torch.nn.Linear(576, vocab, bias=False)
    weight = head.weight.detach()
    hidden_RH, logits_RV = torch.rand(rows, 576), torch.rand(rows, vocab)
    targets_R1 = torch.randint(vocab, (rows, 1))

    model: Any = SimpleNamespace(config=None, get_output_embeddings=torch.nn.Identity)
    """A model whose output layer has given its logits already."""

    def between() -> None:
        leaf = logits_RV.clone().requires_grad_()
        torch.autograd.grad(target_logprobs(model, leaf, targets_R1).sum(), leaf)

    ways: dict[str, Callable[[], Any]] = {
        "update": lambda: trainer.forward_backward(data, "importance_sampling").result(),
        "products": lambda: [
            (product(hidden_RH, weight), product(logits_RV, weight.T)) for _ in range(read // rows)
        ],
        "between": lambda: [between() for _ in range(read // rows)],
        "copy, no part of it": lambda: [logits_RV.clone() for _ in range(read // rows)],
    }
    medians = median_seconds(ways)
    medians["between"] -= medians["copy, no part of it"]
    print(f"{read:,} tokens read, {rows} at once, {torch.get_num_threads()} threads")
    for name, each in medians.items():
        print(f"{name}: {each:.2f} s, {100 * each / medians['update']:.1f} %")


if __name__ == "__main__":
    main()
