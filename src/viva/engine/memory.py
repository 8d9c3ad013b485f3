"""What a training pass keeps in memory, what is free, and how to keep less.

A layer keeps what its backward pass needs. If that would fill most of the memory, layers keep only their inputs and are
computed again in the backward pass (Chen et al. 2016, arXiv 1604.06174): a third slower, and the same to the bit.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

__all__ = ["activation_bytes", "free_bytes", "recomputed"]

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def activation_bytes(config: Any, num_rows: int, length: int, itemsize: int) -> int:
    """About what the layers of a model keep for the backward pass; rather too much than too little.

    Args:
        config: Of the ``transformers`` model.
        num_rows: Rows that go through it.
        length: Their tokens, padding included.
        itemsize: Bytes of a number.
    """
    heads = int(config.num_attention_heads)
    attended = heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    wide = [getattr(config, name, None) for name in ("intermediate_size", "ffn_dim", "n_inner")]
    inner = next((int(size) for size in wide if size), 4 * int(config.hidden_size))
    inner *= int(getattr(config, "num_experts_per_tok", None) or 1)
    # norms and residuals; queries, keys and values before and after the rotation, and the output; the gated product
    numbers = 10 * int(config.hidden_size) + 6 * attended + 4 * inner
    if config._attn_implementation == "eager":  # keeps scores, bounded scores and weights
        numbers += 3 * heads * length
    return num_rows * length * int(config.num_hidden_layers) * numbers * itemsize


def free_bytes(device: torch.device) -> int | None:
    """Memory that could be taken now, ``None`` where that cannot be found out."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    found = [value for value in (_machine_bytes(), _container_bytes()) if value is not None]
    return min(found) if found else None


@contextmanager
def recomputed(layers: Any) -> Generator[None, None, None]:
    """Within this context, layers keep only their inputs. The backward pass belongs into it, too."""
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _machine_bytes() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:  # not Linux
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None


def _container_bytes() -> int | None:
    """What the limit of the control group leaves; file pages that can be dropped do not count as used."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
