"""How far sampler and trainer are from a forward pass of `transformers` in float64, on replies of a real model.

    python benchmarks/exactness.py [model_name=FOLDER] [problems=FILE.jsonl]

By default SmolLM2-135M-Instruct (``make models``), else the folder of a model, such as one that ``viva export`` merged.
Two replies of at most 28 tokens to each of the first 14 problems (``query``; by default those of ``make demo``) at
temperature 1, in float32. Error of the
logprobs in nats, root mean square and largest. With ``VIVA_KERNELS=off`` torch's operations compute all of it.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import tinker
import torch
from transformers import AutoModelForCausalLM

from viva.conversation.rendering import build_prompt, load_renderer
from viva.engine import LocalServiceClient
from viva.recipes.common import resolve_model
from viva.recipes.demo import model_path, word_problems
from viva.threads import prepare_threads

PROBLEMS, REPLIES, TOKENS = 14, 2, 28


def exact_logprobs(model: torch.nn.Module, tokens: list[int], count: int) -> torch.Tensor:
    """Logprobs of the last tokens, in float64."""
    with torch.inference_mode():
        rows = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return rows[range(len(tokens) - count - 1, len(tokens) - 1), tokens[-count:]]


async def errors(folder: str, questions: Sequence[str]) -> dict[str, torch.Tensor]:
    """Errors of all sampled tokens by who computed them."""
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    trainer = await LocalServiceClient(device="cpu").create_lora_training_client(folder, rank=4)
    renderer = load_renderer(trainer.get_tokenizer(), model_name=folder, renderer_name=None)
    sampler = await trainer.save_weights_and_get_sampling_client()
    found: dict[str, list[torch.Tensor]] = {"sampler, decode": [], "sampler, prompt": [], "trainer": []}
    for seed, question in enumerate(questions):
        prompt = build_prompt(renderer, [{"role": "user", "content": question}])
        params = tinker.SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=seed)
        for reply in (await sampler.sample(prompt, REPLIES, params)).sequences:
            tokens, count = [*prompt.to_ints(), *reply.tokens], len(reply.tokens)
            scored = await sampler.compute_logprobs_async(tinker.ModelInput.from_ints(tokens))
            datum = tinker.Datum(
                model_input=tinker.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tinker.TensorData.from_torch(torch.tensor(tokens[1:])),
                    "weights": tinker.TensorData.from_torch(torch.ones(len(tokens) - 1)),
                },
            )
            output = (await trainer.forward([datum], "cross_entropy")).loss_fn_outputs[0]
            logprobs = (reply.logprobs, scored[-count:], output["logprobs"].tolist()[-count:])
            truth = exact_logprobs(exact, tokens, count)
            for name, each in zip(found, logprobs, strict=True):
                found[name].append(torch.tensor(each, dtype=torch.float64) - truth)
    return {name: torch.cat(parts) for name, parts in found.items()}


def main(arguments: list[str]) -> None:
    """Print the errors."""
    prepare_threads()
    named = dict(argument.split("=", 1) for argument in arguments)
    folder = resolve_model(named.pop("model_name", str(model_path())))
    file = named.pop("problems", None)
    if named:
        raise SystemExit(f"unknown options {', '.join(named)}; allowed: model_name, problems")
    questions = (
        [question for question, _ in word_problems()[0]]
        if file is None
        else [json.loads(line)["query"] for line in Path(file).read_text(encoding="utf-8").splitlines()]
    )
    for name, each in asyncio.run(errors(folder, questions[:PROBLEMS])).items():
        print(f"{name:16} root mean square {each.square().mean().sqrt():.1e}, largest {each.abs().max():.1e}")


if __name__ == "__main__":
    main(sys.argv[1:])
