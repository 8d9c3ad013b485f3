"""The live samples of a decoder and where their keys and values are.

Sample ``i`` of the batch is row ``i`` of the key-value store. A row that leaves is replaced by the last one, so the
live rows are always the first ones and a decode step works on views, not copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import tinker
import torch

from viva.engine.attention import RaggedCache
from viva.engine.prefixes import BLOCK, Prefix, PrefixCache, block_digests
from viva.engine.requests import SampleRequest
from viva.engine.sampling import UniformStream
from viva.engine.sdk import make_sequence

__all__ = ["Prompt", "Row", "RowTable"]


@dataclass(kw_only=True, eq=False)
class Row:
    """One live sample."""

    request: SampleRequest
    index: int
    """Which of the request's samples."""
    length: int
    """Tokens whose keys and values are stored: all but the last sampled one."""
    numbers: UniformStream
    prefix: Prefix | None = None
    """How other prompts find this row's prompt."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    topk_tokens: list[np.ndarray] = field(default_factory=list[np.ndarray])
    topk_logprobs: list[np.ndarray] = field(default_factory=list[np.ndarray])

    def stop_reason(self) -> str | None:
        """Why the sample ends after its last token, or ``None`` if it goes on."""
        if self.request.stop.ends(self.tokens):
            return "stop"
        return "length" if len(self.tokens) >= self.request.max_tokens else None

    def sequence(self, stop_reason: str) -> tinker.SampledSequence:
        """The finished sample."""
        topk = (np.stack(self.topk_tokens), np.stack(self.topk_logprobs)) if self.topk_tokens else None
        return make_sequence(
            stop_reason="stop" if stop_reason == "stop" else "length",
            sequence_id=f"{self.request.name}-{self.index}",
            tokens=self.tokens,
            logprobs=self.logprobs,
            topk=topk,
        )


@dataclass(kw_only=True, eq=False)
class Prompt:
    """A prompt about to be prefilled, for every request that has it."""

    requests: list[SampleRequest]
    samples: list[int]
    """How many samples of each request start now."""
    past: int
    """Leading tokens taken from `source`."""
    source: Prefix | None

    @property
    def tokens(self) -> np.ndarray:
        """Token ids the model reads."""
        return self.requests[0].fed

    @property
    def num_new(self) -> int:
        """Tokens to compute."""
        return len(self.tokens) - self.past


class RowTable:
    """Live rows, their key-value store and the beginnings that can be found in it."""

    def __init__(self, max_saved_bytes: int) -> None:
        self.rows: list[Row] = []
        self.cache = RaggedCache(rows=1)
        self._max_saved_bytes = max_saved_bytes
        self.forget()

    def forget(self) -> None:
        """Make everything stored unfindable."""
        self._prefixes = PrefixCache(self._max_saved_bytes)

    def lookup(self, request: SampleRequest) -> tuple[int, Prefix | None]:
        """The longest stored beginning of the prompt: its length in tokens, and where it is."""
        blocks, prefix = self._prefixes.find(request.digests[: request.reusable // BLOCK])
        return blocks * BLOCK, prefix

    def load(self, prompts: Sequence[Prompt]) -> None:
        """Put the stored beginnings of these prompts into the rows after the live ones."""
        for slot, prompt in enumerate(prompts, start=len(self.rows)):
            source = prompt.source
            if source is None:
                continue
            if source.states is not None:
                self.cache.write_row(slot, source.states, prompt.past)
            elif source.row is not None:
                self.cache.reserve(slot + 1, prompt.past)
                self.cache.copy_row(source.row, slot, prompt.past)

    def start(self, prompts: Sequence[Prompt]) -> list[int]:
        """Make live rows of prompts whose keys and values lie in the rows after the live ones.

        Returns:
            For every new row the index of its prompt.
        """
        first = len(self.rows)
        origins = [index for index, prompt in enumerate(prompts) if sum(prompt.samples)]
        for slot, prompt in enumerate(prompts, start=first):
            if not sum(prompt.samples):  # scored only
                self._save(slot, len(prompt.tokens), prompt.requests[0].digests)
        samples = [
            [
                (request, request.started + offset)
                for request, count in zip(prompt.requests, prompt.samples, strict=True)
                for offset in range(count)
            ]
            for prompt in prompts
        ]
        order = [(index, 0) for index in origins]
        order += [(index, copy) for index in origins for copy in range(1, len(samples[index]))]
        self.cache.reserve(first + max(len(order), len(prompts)), 0)
        # the first samples move down over rows that were only scored; no row is read after it was overwritten
        for slot, (index, copy) in enumerate(order, start=first):
            request, sample = samples[index][copy]
            length = len(request.prompt)
            place = first + index if copy == 0 else first + origins.index(index)
            if place != slot:
                self.cache.copy_row(place, slot, length)
            row = Row(
                request=request, index=sample, length=length, numbers=UniformStream(request.seed, sample)
            )
            self.rows.append(row)
            if copy == 0:
                row.prefix = Prefix(digests=request.digests, row=slot)
                self._prefixes.add(row.prefix)
        for prompt in prompts:
            for request, count in zip(prompt.requests, prompt.samples, strict=True):
                request.started += count
        return [index for index, _ in order]

    def retire(self, slots: Sequence[int], *, keep: bool) -> None:
        """Take rows out of the batch; with ``keep`` what they computed stays findable."""
        for slot in sorted(slots, reverse=True):
            row = self.rows[slot]
            if row.prefix is not None:
                self._prefixes.remove(row.prefix)
            if keep:
                tokens = np.concatenate([row.request.prompt, np.asarray(row.tokens, dtype=np.int64)])
                self._save(slot, row.length, block_digests(tokens))
            last = self.rows.pop()
            if last is not row:
                self.cache.copy_row(len(self.rows), slot, last.length)
                self.rows[slot] = last
                if last.prefix is not None:
                    last.prefix.row = slot
            if not keep:
                self.cache.clear_row(len(self.rows))

    def shrink(self, max_bytes: int) -> None:
        """Free the key-value store of an idle decoder if it is larger than this."""
        if not self.rows and self.cache.num_bytes > max_bytes:
            self.cache = RaggedCache(rows=1)

    def _save(self, slot: int, length: int, digests: list[bytes]) -> None:
        blocks = min(len(digests), length // BLOCK)
        if blocks:
            states: list[torch.Tensor] = self.cache.read_row(slot, blocks * BLOCK)
            self._prefixes.add(Prefix(digests=digests[:blocks], states=states))
