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
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

from memory import random_prompts, training_data

from viva.threads import prepare_threads

Sizes = Mapping[str, int]


def rollouts(model: str, sizes: Sizes) -> Callable[[int], None]:
    """The half of a step that samples, as a function of the step's number."""
    import tinker

    from viva.engine import LocalServiceClient

    sampler = LocalServiceClient().create_sampling_client(base_model=model)
    encode = sampler.get_tokenizer().encode

    def work(step: int) -> None:
        asked = random_prompts(random.Random(step), encode, prompts=sizes["prompts"], words=sizes["words"])
        params = tinker.SamplingParams(max_tokens=sizes["tokens"], temperature=0.8, seed=step)
        for future in [sampler.sample(each, sizes["samples"], params) for each in asked]:
            future.result()

    return work


def updates(model: str, sizes: Sizes) -> Callable[[int], None]:
    """The half of a step that trains, as a function of the step's number."""
    import tinker

    from viva.engine import LocalServiceClient

    trainer = LocalServiceClient().create_lora_training_client(base_model=model, rank=32)
    data = training_data(
        min(20_000, len(trainer.get_tokenizer())),
        prompts=sizes["prompts"],
        samples=sizes["samples"],
        prompt_tokens=sizes["words"],
        reply_tokens=sizes["tokens"],
    )

    def work(_: int) -> None:
        trainer.forward_backward(data, "importance_sampling").result()
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-5)).result()

    return work


KINDS = {"rollouts": rollouts, "updates": updates}


def _process(pipe: Connection, kinds: Sequence[str], model: str, sizes: Sizes) -> None:
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


def measured(
    groups: Sequence[Sequence[str]], *, threads: int, steps: int, model: str, sizes: Sizes
) -> list[dict[str, float]]:
    """Run a process for each group of kinds, all at once, and return what each step took of them together.

    Raises:
        EOFError: If a process ended before it was done.
    """
    # the children read them, as they are started afresh
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    for kinds in groups:
        ours, theirs = context.Pipe()
        context.Process(target=_process, args=(theirs, kinds, model, sizes), daemon=True).start()
        theirs.close()  # or the end of the process would not be seen
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    found: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send(step)
        seconds = {kind: value for pipe in pipes for kind, value in pipe.recv().items()}
        found.append(seconds | {"step": time.perf_counter() - began})
    for pipe, kinds in zip(pipes, groups, strict=True):
        pipe.send(None)
        print(f"{' and '.join(kinds)}, {threads} threads: peak {pipe.recv():,.0f} MiB", flush=True)
    for child in multiprocessing.active_children():
        child.join()
    return found


def compare(model: str, *, steps: int = 4, threads: int = 2, **sizes: int) -> None:
    """Measure both ways and print them."""
    turns = measured([["rollouts", "updates"]], threads=threads, steps=steps, model=model, sizes=sizes)
    apart = [["rollouts"], ["updates"]]
    at_once = measured(apart, threads=max(1, threads // 2), steps=steps, model=model, sizes=sizes)
    for title, each in (("in turns", turns), ("at once", at_once)):
        means = {name: sum(step[name] for step in each) / len(each) for name in each[0]}
        print(f"{title}: {', '.join(f'{name} {value:.2f} s' for name, value in means.items())}")
    ratios = [one["step"] / other["step"] for one, other in zip(turns, at_once, strict=True)]
    print(f"in turns / at once: {sum(ratios) / len(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def main(argv: list[str]) -> None:
    """Read the options."""
    from viva.recipes.common import resolve_model
    from viva.recipes.demo import model_path

    options = {"prompts": 8, "samples": 8, "tokens": 40, "words": 30, "steps": 4, "threads": 2}
    given = dict(each.split("=", 1) for each in argv)
    model = resolve_model(given.pop("model_name", str(model_path())))
    if unknown := given.keys() - options.keys():
        sys.exit(f"unknown option {min(unknown)!r}; allowed: {', '.join(options)}, model_name")
    compare(model, **options | {name: int(value) for name, value in given.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
