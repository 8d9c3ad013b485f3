"""What would 8-bit weights of the frozen base gain a decode step, and what would they change?

    python benchmarks/int8.py

Both on SmolLM2-135M-Instruct (``make models``), by torch's own products with weights of 8 bits, which are scaled for
each output: one rounds the inputs to 8 bits, too, each time anew, the other has them in float32. Products of a decode
step, by rows: milliseconds of all matrix products of the model in float32, as the engine makes them, and in 8 bits.
Then the log-probabilities of replies to the problems of ``make demo`` that the model sampled in float32: errors against
float64, in nats.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from exactness import PROBLEMS, TOKENS, exact_logprobs
from products import median_seconds
from torch import nn
from torch.ao.quantization import quantize_dynamic
from transformers import AutoModelForCausalLM, AutoTokenizer

from viva.engine.gguf import gguf_folder
from viva.engine.linear import join_linears
from viva.recipes.demo import model_path, word_problems
from viva.threads import prepare_threads

ROWS = (1, 8, 64, 256)
EXACT, WEIGHTS, BOTH = "float32", "8-bit weights", "8-bit weights and inputs"


class RoundedLinear(nn.Module):
    """A layer with weights of 8 bits; inputs and sums are float32."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self._scale = layer.weight.abs().amax(dim=1) / 127
        self._weight = (layer.weight / self._scale[:, None]).round().to(torch.int8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., I]`` inputs to ``[..., O]`` outputs."""
        flat = torch._weight_int8pack_mm(inputs.flatten(0, -2), self._weight, self._scale)
        return flat.unflatten(0, inputs.shape[:-1])


def rounded(module: nn.Module) -> nn.Module:
    """A copy of a model whose layers are `RoundedLinear`."""
    copied = copy.deepcopy(module)
    for parent in list(copied.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, RoundedLinear(child))
    return copied


def dynamic(module: nn.Module) -> nn.Module:
    """A copy of a model whose layers round weights and inputs."""
    return quantize_dynamic(copy.deepcopy(module), {nn.Linear}, dtype=torch.qint8)


def multiply(layers: Sequence[Callable[[torch.Tensor], Any]], inputs: Sequence[torch.Tensor]) -> None:
    """One product of each layer."""
    for layer, each in zip(layers, inputs, strict=True):
        layer(each)


def print_products(model: nn.Module) -> None:
    """A table by rows."""
    linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
    ways: Mapping[str, list[Any]] = {
        EXACT: [join_linears([each]) for each in linears],
        WEIGHTS: [RoundedLinear(each) for each in linears],
        BOTH: [dynamic(nn.Sequential(each)) for each in linears],
    }
    print(f"| rows | {' | '.join(ways)} |\n|---|---|---|---|")
    for rows in ROWS:
        inputs = [torch.rand(rows, each.in_features) for each in linears]
        found = median_seconds({name: partial(multiply, layers, inputs) for name, layers in ways.items()})
        print(f"| {rows} | {' | '.join(f'{1e3 * each:.1f}' for each in found.values())} |", flush=True)


def print_drift(model: Any, tokenizer: Any) -> None:
    """Errors of log-probabilities of sampled replies."""
    exact = copy.deepcopy(model).double()
    models = {EXACT: model, WEIGHTS: rounded(model), BOTH: dynamic(model)}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in models}
    for seed, (question, _) in enumerate(word_problems()[0][:PROBLEMS]):
        torch.manual_seed(seed)
        message = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        sampled = model.generate(**prompt, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=TOKENS)
        tokens = sampled[0].tolist()
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


def main() -> None:
    """Print both."""
    prepare_threads()
    folder = gguf_folder(model_path())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        print_products(model)
        print_drift(model, AutoTokenizer.from_pretrained(folder))


if __name__ == "__main__":
    main()
