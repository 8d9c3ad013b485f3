"""llama.cpp, by its Python binding: batches of samples, all sequences of a batch in one decoding step.

Settings: ``model`` (folder with ``model-PRECISION.gguf``), ``precision`` and ``batches`` (`work.batches`). A prompt is
read once for all its samples. Before every batch the model's file is loaded anew (from the page cache; what merged,
quantised and wrote it is not counted). Its own sampler draws; it gives no log-probabilities.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from channel import serve
from work import batches

AT_ONCE = 2048
"""Tokens of prompts in one step."""


class Engine:
    """A loaded model with room for the sequences of one batch."""

    def __init__(self, file: Path, rows: int, tokens: int, seed: int) -> None:
        from llama_cpp import llama_cpp

        self.lib, threads = llama_cpp, int(os.environ["OMP_NUM_THREADS"])
        self.model = self.lib.llama_model_load_from_file(
            str(file).encode(), self.lib.llama_model_default_params()
        )
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = tokens, AT_ONCE, 512
        params.n_seq_max, params.kv_unified = rows, True
        params.n_threads = params.n_threads_batch = threads
        self.context = self.lib.llama_init_from_model(self.model, params)
        self.sampler = self.lib.llama_sampler_chain_init(self.lib.llama_sampler_chain_default_params())
        self.lib.llama_sampler_chain_add(self.sampler, self.lib.llama_sampler_init_dist(seed))
        self.batch = self.lib.llama_batch_init(AT_ONCE, 0, 1)

    def close(self) -> None:
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_sampler_free(self.sampler)
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)

    def decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Compute tokens, each with its place, its sequence, and whether the next one is drawn from it."""
        self.batch.n_tokens = len(rows)
        for index, (token, place, sequence, is_read) in enumerate(rows):
            self.batch.token[index], self.batch.pos[index] = token, place
            self.batch.n_seq_id[index], self.batch.seq_id[index][0] = 1, sequence
            self.batch.logits[index] = is_read
        if self.lib.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode failed on {len(rows)} tokens")

    def draw(self, index: int) -> int:
        """The token after the one at a place of the newest step."""
        return int(self.lib.llama_sampler_sample(self.sampler, self.context, index))

    def generate(self, asked: Sequence[Sequence[int]], samples: int, new: int) -> int:
        """How many tokens were drawn: ``samples`` sequences of ``new`` tokens by prompt."""
        tokens: list[int] = []
        for number, prompt in enumerate(asked):
            first = number * samples
            for start in range(0, len(prompt), AT_ONCE):
                part = prompt[start : start + AT_ONCE]
                last = len(prompt) - 1
                self.decode([(token, at, first, at == last) for at, token in enumerate(part, start)])
            tokens += [self.draw(-1) for _ in range(samples)]
            memory = self.lib.llama_get_memory(self.context)
            for copy in range(first + 1, first + samples):
                self.lib.llama_memory_seq_cp(memory, first, copy, -1, -1)
        count, length = len(tokens), len(asked[0])
        for step in range(1, new):
            self.decode([(token, length + step - 1, row, True) for row, token in enumerate(tokens)])
            tokens = [self.draw(row) for row in range(len(tokens))]
            count += len(tokens)
        return count


def make(settings: Mapping[str, Any]) -> Callable[[int], dict[str, float]]:
    file = Path(settings["model"]) / f"model-{settings['precision']}.gguf"

    def step(number: int) -> dict[str, float]:
        def sample(asked: list[list[int]], samples: int, new: int, _: object) -> tuple[int, float, float]:
            rows = len(asked) * samples
            started = time.perf_counter()
            engine = Engine(file, rows, sum(map(len, asked)) + rows * new, number)
            refreshed = time.perf_counter()
            tokens = engine.generate(asked, samples, new)
            ended = time.perf_counter()
            engine.close()
            return tokens, ended - started, refreshed - started

        return batches(settings, number, sample)

    return step


if __name__ == "__main__":
    serve(make, ("llama-cpp-python",))
