"""How many prompt tokens of a conversation step are computed, by tokens that the prefix cache has room for?

    python benchmarks/prefixes.py [system=critique] [conversations=1,2,4] [room=5825,23301,1000000]

The conversations are those of the rows ``critique-smollm2`` and ``conversation-smollm2`` (4 agents, turns of 64 tokens,
votes by label probability), with SmolLM2's tokenizer (`make models`) and one thin random layer: what is computed does
not depend on the weights. 5825 and 23301 tokens are 256 MiB and 1 GiB of SmolLM2-135M in float32. "Least" counts every
different beginning once. Nothing is timed.
"""

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "performance"))

from viva.threads import prepare_threads

BYTES_A_TOKEN = 2 * 16 * 4
"""Keys and values of one head of 16 numbers in float32."""


def save_thin(folder: Path) -> None:
    """A model of one thin layer with SmolLM2's tokenizer."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    from viva.engine.gguf import gguf_folder
    from viva.recipes.demo import model_path

    shutil.copytree(
        gguf_folder(model_path()), folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*")
    )
    config: Any = AutoConfig.from_pretrained(folder)
    config.update({"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16})
    config.update({"num_attention_heads": 2, "num_key_value_heads": 1})
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


class Counts:
    """Prompt tokens that were asked for, those that were computed, and different beginnings among them."""

    def __init__(self) -> None:
        self.asked = self.computed = self.batches = 0
        self._seen: set[bytes] = set()

    @property
    def least(self) -> int:
        """Tokens that a tree would compute that misses nothing."""
        return len(self._seen)

    def add(self, prompts: Sequence[Any]) -> None:
        """Count a batch of the decoder."""
        self.batches += 1
        for prompt in prompts:
            self.asked += len(prompt.tokens)
            self.computed += prompt.num_new
            digest = hashlib.blake2b(digest_size=16)
            for token in prompt.tokens.tolist():
                digest.update(token.to_bytes(4, "little"))
                self._seen.add(digest.digest())


def count(folder: Path, system: str, conversations: int, room: int) -> Counts:
    """Play one step, after one that warms up."""
    import side_conversation

    import viva.engine.service as service
    from viva.engine.decoder import Decoder
    from viva.engine.scheduler import EngineLimits

    found = Counts()
    prefill = Decoder._prefill

    def counted(self: Decoder, prompts: list[Any]) -> bool:
        found.add(prompts)
        return prefill(self, prompts)

    settings = {"engine": "viva", "system": system, "model": str(folder), "precision": "float32", "agents": 4}
    settings |= {"rounds": 3, "conversations": conversations, "max_tokens": 64, "verdict": 1}
    limits = EngineLimits(prefix_cache_bytes=room * BYTES_A_TOKEN)
    service.EngineLimits = lambda: limits  # pyright: ignore[reportAttributeAccessIssue]
    try:
        act = side_conversation.make(settings)
        act(0)
        Decoder._prefill = counted
        act(1)
    finally:
        Decoder._prefill, service.EngineLimits = prefill, EngineLimits
    return found


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    system = given.pop("system", "critique")
    numbers = [
        [int(each) for each in given.pop(name, default).split(",")]
        for name, default in (("conversations", "1,2,4"), ("room", "5825,23301,1000000"))
    ]
    if given:
        sys.exit(f"unknown option {next(iter(given))!r}; allowed: system, conversations, room")
    prepare_threads()
    print("| conversations | room, tokens | asked | computed | least | batches |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        save_thin(Path(name))
        for conversations in numbers[0]:
            for room in numbers[1]:
                found = count(Path(name), system, conversations, room)
                cells = conversations, room, found.asked, found.computed, found.least, found.batches
                print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
