"""What would 8-bit weights of the frozen base gain a decode step, and what would they change?

    python benchmarks/int8.py [rows=1,8,64,256]

Both on SmolLM2-135M-Instruct (``make models``), by torch's own 8-bit products: weights rounded once for each output,
inputs anew for each product. Products of a decode step, by rows: milliseconds of all matrix products of the model in
float32, as the engine makes them, and in 8 bits, medians of tries in turns. Then the log-probabilities of replies to
the problems of ``make demo`` that the model sampled in float32: errors against float64, in nats; also with 8-bit
weights and inputs in float32, for which there are no products here (the output layer stays exact in these).
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from exactness import PROBLEMS, TOKENS, exact_logprobs
from torch import nn
from torch.ao.quantization import quantize_dynamic
from transformers import AutoModelForCausalLM, AutoTokenizer

from viva.engine.gguf import gguf_folder
from viva.engine.linear import join_linears
from viva.recipes.demo import model_path, word_problems
from viva.threads import prepare_threads

TRIES = 7


def in_8_bits(module: nn.Module) -> nn.Module:
    """A copy whose linear layers have 8-bit weights."""
    return quantize_dynamic(copy.deepcopy(module), {nn.Linear}, dtype=torch.qint8)


def with_rounded_weights(module: Any) -> Any:
    """A copy in float32 whose linear layers have weights of 8 bits, scaled for each output."""
    copied = copy.deepcopy(module)
    for layer in copied.model.modules():
        if isinstance(layer, nn.Linear):
            scale = layer.weight.abs().amax(dim=1, keepdim=True) / 127
            layer.weight.copy_((layer.weight / scale).round() * scale)
    return copied


def step_ms(layers: list[Callable[[torch.Tensor], Any]], inputs: list[torch.Tensor]) -> float:
    """Milliseconds of one product of each layer."""
    start = time.perf_counter()
    for layer, each in zip(layers, inputs, strict=True):
        layer(each)
    return 1e3 * (time.perf_counter() - start)


def print_products(model: nn.Module, rows: list[int]) -> None:
    """A table of both kinds of products, by rows."""
    linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
    ways = {
        "float32": [join_linears([each]) for each in linears],
        "8 bits": [in_8_bits(nn.Sequential(each)) for each in linears],
    }
    print(f"| rows | {' | '.join(ways)} | gain |\n|---|---|---|---|")
    for count in rows:
        inputs = [torch.rand(count, each.in_features) for each in linears]
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(1 + TRIES):
            for name, layers in ways.items():
                found[name].append(step_ms(layers, inputs))
        exact, rounded = (statistics.median(each[1:]) for each in found.values())
        print(f"| {count} | {exact:.1f} | {rounded:.1f} | {exact / rounded:.2f}x |", flush=True)


def print_drift(model: Any, tokenizer: Any) -> None:
    """Errors of log-probabilities of sampled replies."""
    exact = copy.deepcopy(model).double()
    models = {
        "float32": model,
        "8 bits": in_8_bits(model),
        "8-bit weights alone": with_rounded_weights(model),
    }
    found: dict[str, list[torch.Tensor]] = {name: [] for name in models}
    for seed, (question, _) in enumerate(word_problems()[0][:PROBLEMS]):
        torch.manual_seed(seed)
        message = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**prompt, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=TOKENS)[
            0
        ].tolist()
        count = len(tokens) - prompt["input_ids"].shape[1]
        truth = exact_logprobs(exact, tokens, count)
        for name, each in models.items():
            found[name].append(exact_logprobs(each, tokens, count).double() - truth)
    for name, parts in found.items():
        errors = torch.cat(parts)
        rms, ratio = errors.square().mean().sqrt(), errors.exp()
        print(
            f"{name}: {len(errors)} tokens, error of a logprob {rms:.1e} root mean square, {errors.abs().max():.1e} at "
            f"most; probability ratios {ratio.min():.2f} to {ratio.max():.2f}"
        )


def main(arguments: list[str]) -> None:
    """Print both tables."""
    given = dict(argument.split("=", 1) for argument in arguments)
    prepare_threads()
    folder = gguf_folder(model_path())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        print_products(model, [int(each) for each in given.get("rows", "1,8,64,256").split(",")])
        print_drift(model, AutoTokenizer.from_pretrained(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
