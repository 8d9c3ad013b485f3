"""Rollouts and updates at once, in two processes with half the threads each: how much of a step's time that saves.

    python benchmarks/overlap.py [prompts=8] [samples=8] [tokens=40] [words=30] [steps=4] [threads=2] [model_name=tiny]

SmolLM2-135M-Instruct (``make models``) unless `model_name` says otherwise, LoRA rank 32, float32. A step is `samples`
of `tokens` tokens for each of `prompts` prompts of `words` random words, and an update (`importance_sampling`) of as
many sequences. First one process does both in turns with all threads; then two do one each, at the same time, with
half of the threads, as rollouts that run one update ahead would. What is printed: seconds of a step in both ways and of
the two halves, and the peak of memory of each process.
"""

import multiprocessing
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from viva.threads import prepare_threads

sys.path.append(str(Path(__file__).parent))

Sizes = Mapping[str, int]


def _rollouts(model: str, sizes: Sizes) -> Callable[[int], None]:
    import tinker
    from memory import WORDS

    from viva.engine import LocalServiceClient

    sampler = LocalServiceClient().create_sampling_client(base_model=model)
    encode = sampler.get_tokenizer().encode

    def work(step: int) -> None:
        rng = random.Random(step)
        texts = [" ".join(rng.choices(WORDS, k=sizes["words"])) for _ in range(sizes["prompts"])]
        asked = [tinker.ModelInput.from_ints(encode(text)) for text in texts]
        params = tinker.SamplingParams(max_tokens=sizes["tokens"], temperature=0.8, seed=step)
        for future in [sampler.sample(each, sizes["samples"], params) for each in asked]:
            future.result()

    return work


def _updates(model: str, sizes: Sizes) -> Callable[[int], None]:
    import tinker
    from memory import training_data

    from viva.engine import LocalServiceClient

    trainer = LocalServiceClient().create_lora_training_client(base_model=model, rank=32)
    highest = min(20_000, len(trainer.get_tokenizer()))
    data = training_data(
        highest,
        prompts=sizes["prompts"],
        samples=sizes["samples"],
        prompt_tokens=sizes["words"],
        reply_tokens=sizes["tokens"],
    )

    def work(step: int) -> None:
        trainer.forward_backward(data, "importance_sampling").result()
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-5 * (step + 1))).result()

    return work


KINDS = {"rollouts": _rollouts, "updates": _updates}


def _process(pipe: Connection, kinds: list[str], model: str, sizes: Sizes) -> None:
    """Do what is asked, step by step, and tell the seconds of each kind, and at the end the peak in MiB."""
    prepare_threads()  # before torch is imported
    works = {kind: KINDS[kind](model, sizes) for kind in kinds}
    for work in works.values():
        work(0)  # compiles, allocates
    pipe.send("ready")
    while (step := pipe.recv()) is not None:
        seconds = {}
        for kind, work in works.items():
            began = time.perf_counter()
            work(step)
            seconds[kind] = time.perf_counter() - began
        pipe.send(seconds)
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def measured(groups: list[list[str]], threads: int, model: str, sizes: Sizes) -> list[dict[str, float]]:
    """Run a process for each group of kinds, all at once, and return what each step took of them together."""
    # the children read them, as they are started afresh
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    context = multiprocessing.get_context("spawn")
    started = []
    for kinds in groups:
        ours, theirs = context.Pipe()
        process = context.Process(target=_process, args=(theirs, kinds, model, sizes))
        process.start()
        started.append((process, ours))
    for _, pipe in started:
        pipe.recv()
    steps = []
    for step in range(1, sizes["steps"] + 1):
        began = time.perf_counter()
        for _, pipe in started:
            pipe.send(step)
        seconds = {kind: value for _, pipe in started for kind, value in pipe.recv().items()}
        steps.append(seconds | {"step": time.perf_counter() - began})
    for (process, pipe), kinds in zip(started, groups, strict=True):
        pipe.send(None)
        print(f"{' and '.join(kinds)}, {threads} threads: peak {pipe.recv():,.0f} MiB", flush=True)
        process.join()
    return steps


def main(argv: list[str]) -> None:
    """Measure both ways and print them."""
    from viva.recipes.common import resolve_model
    from viva.recipes.demo import model_path

    given = dict(each.split("=", 1) for each in argv)
    model = resolve_model(given.pop("model_name", str(model_path())))
    sizes = {"prompts": 8, "samples": 8, "tokens": 40, "words": 30, "steps": 4, "threads": 2}
    sizes |= {name: int(value) for name, value in given.items()}
    threads = sizes["threads"]
    turns = measured([["rollouts", "updates"]], threads, model, sizes)
    at_once = measured([["rollouts"], ["updates"]], max(1, threads // 2), model, sizes)
    for title, steps in (("in turns", turns), ("at once", at_once)):
        means = {name: sum(each[name] for each in steps) / len(steps) for name in steps[0]}
        told = ", ".join(f"{name} {value:.2f} s" for name, value in means.items())
        print(f"{title}: {told}")
    ratios = [one["step"] / other["step"] for one, other in zip(turns, at_once, strict=True)]
    print(f"in turns / at once: {sum(ratios) / len(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main(sys.argv[1:])
