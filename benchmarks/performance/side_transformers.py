"""transformers' own generation: ``generate`` in one padded batch, and ``generate_batch``, its continuous batching.

Settings: ``work`` (``ragged`` or ``judge``), ``model`` (folder), ``size``, ``precision``, and what the work takes.
The adapter is left out: a merged one costs nothing. Continuous batching gets a cache of a size that
suits a CPU: by default it takes nine tenths of the memory.
"""

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from channel import serve
from work import tail, words


def load(settings: Mapping[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, settings["precision"])
    return AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()


def padded(asked: list[list[int]]) -> dict[str, Any]:
    """Left-padded ids and their mask."""
    import torch

    longest = max(map(len, asked))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in asked])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in asked])
    return {"input_ids": ids, "attention_mask": mask}


def ragged(settings: Mapping[str, Any]) -> Callable[[int], dict[str, float]]:
    """Groups of samples that end at one of many stop tokens; ``continuous`` says in which way."""
    import torch
    from transformers import ContinuousBatchingConfig

    model, ids = load(settings), words(settings["model"])
    paged = ContinuousBatchingConfig(
        page_size=64, num_blocks=512, max_batch_tokens=512, max_requests_per_batch=64, seed=0
    )
    stop = list(ids[:: settings["stop_every"]])
    model.generation_config.update(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=stop,
        pad_token_id=0,
        max_new_tokens=settings["max_tokens"],
        num_return_sequences=settings["group"],
    )
    ends = torch.tensor(stop)

    def static(asked: list[list[int]]) -> int:
        inputs = padded(asked)
        out = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
        is_end = torch.isin(out, ends)
        first = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, out.shape[1])
        return int(first.sum())

    def continuous(asked: list[list[int]]) -> int:
        outputs = model.generate_batch(asked, continuous_batching_config=paged)
        assert len(outputs) == len(asked) * settings["group"], "generate_batch lost requests"
        return sum(len(output.generated_tokens) for output in outputs.values())

    generate = continuous if settings["continuous"] else static

    def step(number: int) -> dict[str, float]:
        rng = random.Random(number)
        lengths = settings["prompts"] if number else settings["prompts"][:4]  # the latter to warm up
        asked = [tail(ids, length, rng) for length in lengths]
        torch.manual_seed(number)
        started = time.perf_counter()
        tokens = generate(asked)
        seconds = time.perf_counter() - started
        return {"cost": 1000 * seconds / tokens, "seconds": seconds, "tokens": tokens}

    return step


def judge(settings: Mapping[str, Any]) -> Callable[[int], dict[str, float]]:
    """A generated verdict for each pair behind one transcript, all in one batch."""

    model, ids = load(settings), words(settings["model"])
    model.generation_config.update(
        do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0, max_new_tokens=settings["verdict"]
    )

    def step(number: int) -> dict[str, float]:
        rng = random.Random(number)
        transcript = tail(ids, settings["transcript"], rng)
        asked = [transcript + tail(ids, settings["suffix"], rng) for _ in range(settings["pairs"])]
        started = time.perf_counter()
        out = model.generate(**padded(asked))
        assert out.shape[1] == settings["transcript"] + settings["suffix"] + settings["verdict"]
        return {"cost": time.perf_counter() - started}

    return step


WORKS = {"ragged": ragged, "judge": judge}

if __name__ == "__main__":
    serve(lambda settings: WORKS[settings["work"]](settings), ("torch", "transformers"))
