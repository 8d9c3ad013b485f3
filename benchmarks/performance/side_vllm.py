"""vLLM's build for CPUs: batches of samples, with its prefix cache and continuous batching.

Settings: ``work``, ``model`` (folder), ``precision``. Work ``batches`` has ``batches`` (`work.batches`). Before every
batch the weights are read anew into the running engine (from the page cache; what merged and wrote them is not
counted), and the prefix cache is emptied, as after a training step. Work ``requests`` answers single requests from the
standard input, all that wait in one batch, for `plain.VllmClient`.
"""

import itertools
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from channel import Channel, serve
from work import batches

GIB_OF_KEYS_AND_VALUES = {"batches": 4, "requests": 1}
"""The latter beside processes that train: 23,000 tokens of SmolLM2-135M in float32."""


def load(settings: Mapping[str, Any]) -> Any:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(GIB_OF_KEYS_AND_VALUES[settings["work"]])
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    # by itself it keeps a core free, and two threads on the one that is left wait for each other
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    from vllm import LLM

    return LLM(
        model=settings["model"],
        dtype=settings["precision"],
        max_model_len=8192,
        max_num_seqs=256,
        enable_prefix_caching=True,
        seed=0,
    )


def make(settings: Mapping[str, Any]) -> Callable[[int], dict[str, float]]:
    from vllm import SamplingParams

    engine = load(settings)

    def sample(asked: list[list[int]], samples: int, new: int, _: object) -> tuple[int, float, float]:
        prompts = [{"prompt_token_ids": each} for each in asked]
        params = SamplingParams(n=samples, max_tokens=new, temperature=1.0, ignore_eos=True, logprobs=0)
        started = time.perf_counter()
        refresh(engine)
        refreshed = time.perf_counter()
        answers = engine.generate(prompts, params, use_tqdm=False)
        ended = time.perf_counter()
        tokens = sum(len(one.token_ids) for answer in answers for one in answer.outputs)
        return tokens, ended - started, refreshed - started

    return lambda number: batches(settings, number, sample)


def refresh(engine: Any) -> None:
    """What follows a training step."""
    engine.collective_rpc("reload_weights")
    engine.reset_prefix_cache()


def answer_requests(channel: Channel) -> None:
    """Answer ``{id, prompt, max_tokens, logprobs}`` and ``{id, refresh}``, lines of JSON like the answers.

    No request has a seed of its own: where a prompt is computed in parts, vLLM 0.32 ends with "CPU Generator does not
    use offset".
    """
    from vllm import SamplingParams

    wrapper = load(channel.settings)
    engine = wrapper.llm_engine
    lines: queue.Queue[str] = queue.Queue()
    read = itertools.chain(sys.stdin, [""])
    threading.Thread(target=lambda: [lines.put(line) for line in read], daemon=True).start()
    channel.ready("vllm-cpu", "torch")
    while True:
        while not lines.empty() or not engine.has_unfinished_requests():
            line = lines.get()
            if not line:
                return
            request = json.loads(line)
            if "refresh" in request:
                refresh(wrapper)
                channel.send({"id": request["id"]})
                continue
            params = SamplingParams(
                max_tokens=request["max_tokens"],
                temperature=1.0,
                ignore_eos=True,
                logprobs=request["logprobs"],
            )
            engine.add_request(str(request["id"]), {"prompt_token_ids": request["prompt"]}, params)
        for output in engine.step():
            if output.finished:
                channel.send(answer_of(output))


def answer_of(output: Any) -> dict[str, Any]:
    one = output.outputs[0]
    rows = [{token: found.logprob for token, found in row.items()} for row in one.logprobs]
    return {
        "id": int(output.request_id),
        "tokens": list(one.token_ids),
        "logprobs": [row[token] for row, token in zip(rows, one.token_ids, strict=True)],
        "alternatives": rows,
    }


if __name__ == "__main__":
    if json.loads(sys.argv[1])["work"] == "requests":
        answer_requests(Channel())
    else:
        serve(make, ("vllm-cpu", "torch"))
