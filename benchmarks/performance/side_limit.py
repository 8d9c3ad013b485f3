"""How far training, prefill and decode are from what this machine's products and memory allow.

Settings: ``model`` (folder), ``size``, ``precision``. The limit of training and prefill is the time of the frozen
weights' matrix products alone, measured at the very shapes (forward, and for training backward to the inputs). The
output layer and what follows the last layer's keys and values are needed at the tokens that are read alone. Attention,
the adapter, norms and all else count as loss. The limit of a decode
step is reading all weights and the rows' keys and values once at the measured bandwidth, or its products at the best
measured rate, whichever takes longer; how near to it the engine's own products come, with nothing else in the step, is
measured too.
"""

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from channel import serve
from side_viva import open_client, policy_datum
from work import LEARNING_RATE, SHAPES, SIZES, Size, prompts, tail, words

from viva.threads import prepare_threads

DECODE_ROWS = (1, 12, 32)
DECODE_TOKENS = 48
DECODE_LENGTH = SHAPES["balanced"].prompt + DECODE_TOKENS // 2
BYTES = {"float32": 4, "bfloat16": 2}


class Machine:
    """Times of products and reads, measured in this process."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import torch

        self.folder, self.size = settings["model"], SIZES[settings["size"]]
        self.precision, self.dtype = settings["precision"], getattr(torch, settings["precision"])

    def product_s(self, rows: int, into: int, out: int) -> float:
        """Seconds of ``[rows, into] @ [out, into].T``, by torch or by oneDNN; the best of three."""
        import torch

        from viva.engine.linear import product

        inputs, weight = torch.rand(rows, into).to(self.dtype), torch.rand(out, into).to(self.dtype)
        return min(best(lambda: inputs @ weight.T), best(lambda: product(inputs, weight)))

    def products_s(self, rows: int, read: int, *, backward: bool) -> float:
        """Seconds of all products that a pass over ``rows`` tokens needs if ``read`` of them have a next token."""
        size = self.size
        needed = [(read, size.vocab, size.hidden, 1)]
        for out, into, times in size.products:
            in_last = times // size.layers
            is_key_or_value = (out, into, times) == size.keys_and_values
            needed += [
                (rows, out, into, times - in_last),
                (rows if is_key_or_value else read, out, into, in_last),
            ]
        seconds = 0.0
        for count, out, into, times in needed:
            seconds += times * self.product_s(count, into, out)
            if backward:
                seconds += times * self.product_s(count, out, into)
        return seconds

    def rate(self) -> float:
        """Operations per second of a large product."""
        side = 2048
        return 2 * side**3 / self.product_s(side, side, side)

    def bandwidth(self) -> float:
        """Bytes per second of reading."""
        import torch

        numbers = torch.ones(2**27)
        return 4 * 2**27 / best(lambda: numbers.sum())

    def decode_s(self, rows: int, length: int, rate: float, bandwidth: float) -> float:
        """Least seconds of one step of ``rows`` sequences of ``length`` tokens."""
        size, width = self.size, BYTES[self.precision]
        kept = 2 * size.layers * size.kv_heads * size.head * length * rows
        return max(width * (size.parameters + kept) / bandwidth, 2 * size.parameters * rows / rate)


class Products:
    """The matrix products of a decode step as the engine makes them, and nothing else."""

    def __init__(self, size: Size, precision: str) -> None:
        import torch

        from viva.engine.linear import join_linears

        self._dtype = getattr(torch, precision)
        shapes = [*size.products, (size.vocab, size.hidden, 1)]
        self._layers = [
            join_linears([torch.nn.Linear(into, out, bias=False, dtype=self._dtype)])
            for out, into, times in shapes
            for _ in range(times)
        ]
        self._inputs = [into for _, into, times in shapes for _ in range(times)]

    def seconds(self, rows: int) -> float:
        """Of one step. Every weight is another one, so none waits in a cache."""
        import torch

        inputs = {size: torch.rand(rows, size).to(self._dtype) for size in set(self._inputs)}
        return best(
            lambda: [layer(inputs[size]) for layer, size in zip(self._layers, self._inputs, strict=True)]
        )


def best(act: Callable[[], Any]) -> float:
    """Least seconds of three tries, after one to warm up."""
    act()
    found = []
    for _ in range(3):
        started = time.perf_counter()
        act()
        found.append(time.perf_counter() - started)
    return min(found)


def make(settings: Mapping[str, Any]) -> Callable[[int], dict[str, float]]:
    client = open_client(settings)
    machine = Machine(settings)
    products = Products(SIZES[settings["size"]], settings["precision"])

    def step(number: int) -> dict[str, float]:
        rate, bandwidth = machine.rate(), machine.bandwidth()
        found = {"gflops": rate / 1e9, "gb_per_s": bandwidth / 1e9}
        for name in ("distinct", "long"):
            found[f"training_{name}"] = 100 * training_share(client, machine, name, number)
        found["prefill"] = 100 * prefill_share(client, machine, number)
        for rows in DECODE_ROWS:
            found[f"decode_{rows}"] = 100 * decode_share(client, machine, rows, number, rate, bandwidth)
            least = machine.decode_s(rows, DECODE_LENGTH, rate, bandwidth)
            found[f"products_{rows}"] = 100 * least / products.seconds(rows)
        return found

    return step


def training_share(client: Any, machine: Machine, name: str, number: int) -> float:
    """Of one ``forward_backward`` and ``optim_step`` of a shape."""
    import tinker

    shape, folder, rng = SHAPES[name], machine.folder, random.Random(number)
    data = []
    for prompt in prompts(folder, shape, number) * shape.group:
        reply = tail(words(folder), shape.completion, rng)
        data.append(policy_datum(prompt, reply, [-10.0] * shape.completion, 1.0))
    started = time.perf_counter()
    done = client.forward_backward(data, "importance_sampling")
    client.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATE)).result()
    seconds = time.perf_counter() - started
    given = sum(datum.model_input.length for datum in data)
    computed = round(given * done.result().metrics["tree_token_ratio"])
    return machine.products_s(computed, shape.rows * shape.completion, backward=True) / seconds


def prefill_share(client: Any, machine: Machine, number: int) -> float:
    """Of twelve prompts that share nothing, each followed by one token."""
    rows, length = 12, SHAPES["long"].prompt
    at_once = 4  # prompts in one batch of the engine
    seconds = sample_s(client, machine.folder, rows, 1, length, 1, number)
    return rows / at_once * machine.products_s(at_once * length, at_once, backward=False) / seconds


def decode_share(
    client: Any, machine: Machine, rows: int, number: int, rate: float, bandwidth: float
) -> float:
    """Of one step of decoding a group, prefill taken off."""
    length = SHAPES["balanced"].prompt
    first = sample_s(client, machine.folder, 1, rows, length, 1, number)
    seconds = sample_s(client, machine.folder, 1, rows, length, 1 + DECODE_TOKENS, number) - first
    least = machine.decode_s(rows, DECODE_LENGTH, rate, bandwidth)
    return least * DECODE_TOKENS / seconds


def sample_s(
    client: Any, folder: str, distinct: int, group: int, length: int, max_tokens: int, number: int
) -> float:
    """Seconds to sample from a sampler that knows nothing yet."""
    import tinker

    rng = random.Random(f"{number} {max_tokens}")
    asked = [tail(words(folder), length, rng) for _ in range(distinct)]
    sampler = client.save_weights_and_get_sampling_client().result()
    sampler.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=1, stop=[])).result()
    params = tinker.SamplingParams(max_tokens=max_tokens, stop=[], seed=number)
    started = time.perf_counter()
    futures = [sampler.sample(tinker.ModelInput.from_ints(each), group, params) for each in asked]
    for future in futures:
        future.result()
    return time.perf_counter() - started


if __name__ == "__main__":
    prepare_threads()
    serve(make, ("torch", "transformers", "peft", "tinker"))
