"""The running sequences of a decoder, where their keys and values are, and prefixes that can be found again.

Sequence ``i`` of the batch is row ``i`` of the key-value store. One that leaves is replaced by the last one, so the
running ones are always the first rows and a decode step works on views, not copies. Sequences with the same prefix
share it and store only their own tokens.

Turns of a conversation, the judges who read it and the samples of a group begin with the same tokens. A prompt is
looked up by blocks of tokens under a chained digest, and only what follows the longest known prefix is computed.
What is stored is a tree: a sequence that begins like another one stores only what it adds.
A cache belongs to one snapshot of the weights, so it cannot serve keys of other weights.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import tinker
import torch

from viva.engine.attention import RaggedCache
from viva.engine.requests import BLOCK, Drawn, SampleRequest, block_digests
from viva.engine.sampling import Alternatives, uniform_numbers
from viva.engine.step import SharedPrefix
from viva.sdk import make_sequence


@dataclass(kw_only=True, eq=False)
class PrefixNode:
    """A node of the tree: blocks that follow those of another node."""

    parent: "PrefixNode | None"
    start: int
    """Blocks before this node's first. All of them are the parent's or its ancestors'; it may have more than these."""
    digests: list[bytes]
    """One per block of this node, each covering everything up to its end."""
    states: list[torch.Tensor]
    """Keys and values, ``[2, K, length, D]`` per layer."""
    num_children: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the states."""
        return sum(state.nbytes for state in self.states)

    def parts_up_to(self, blocks: int) -> list[list[torch.Tensor]]:
        """Keys and values of the first ``blocks`` of the sequence, which end in this node, part by part."""
        parts: list[list[torch.Tensor]] = []
        node: PrefixNode | None = self
        while node is not None:
            parts.append([state[:, :, : (blocks - node.start) * BLOCK] for state in node.states])
            node, blocks = node.parent, node.start
        return parts[::-1]

    def states_up_to(self, blocks: int) -> list[torch.Tensor]:
        """`parts_up_to` joined, ``[2, K, blocks * BLOCK, D]`` per layer."""
        parts = self.parts_up_to(blocks)
        return parts[0] if len(parts) == 1 else [torch.cat(layer, 2) for layer in zip(*parts, strict=True)]


class PrefixCache:
    """Stored prefixes; the least recently used ones are forgotten beyond ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Memory held."""
        self._by_digest: dict[bytes, PrefixNode] = {}
        self._nodes: OrderedDict[int, PrefixNode] = OrderedDict()

    def find(self, digests: Sequence[bytes]) -> tuple[int, PrefixNode | None]:
        """The longest known prefix: its number of blocks, and the node in which it ends."""
        for blocks in range(len(digests), 0, -1):
            node = self._by_digest.get(digests[blocks - 1])
            if node is not None:
                self._use(node)
                return blocks, node
        return 0, None

    def add(
        self, digests: Sequence[bytes], read: Callable[[int, int], list[torch.Tensor]]
    ) -> PrefixNode | None:
        """Store what is not known yet of a sequence, given its blocks' digests.

        `read` gives the states of its tokens from a first to before a last one. What was used least recently may be
        pushed out.

        Returns:
            The node in which the sequence ends (even if it is too large to be found again); ``None`` for an empty one.
        """
        start, parent = self.find(digests)
        if start == len(digests):
            return parent
        states = read(start * BLOCK, len(digests) * BLOCK)
        node = PrefixNode(parent=parent, start=start, digests=list(digests[start:]), states=states)
        self._nodes[id(node)] = node
        self.num_bytes += node.num_bytes
        self._by_digest.update(dict.fromkeys(node.digests, node))
        if parent is not None:
            parent.num_children += 1
        while self.num_bytes > self._max_bytes:
            self._remove(next(each for each in self._nodes.values() if not each.num_children))
        return node

    def _use(self, node: PrefixNode | None) -> None:
        """A node's ancestors are used after it, so that the end of a sequence is forgotten before its start."""
        while node is not None:
            self._nodes.move_to_end(id(node))
            node = node.parent

    def _remove(self, node: PrefixNode) -> None:
        del self._nodes[id(node)]
        self.num_bytes -= node.num_bytes
        for digest in node.digests:
            del self._by_digest[digest]
        if node.parent is not None:
            node.parent.num_children -= 1


LEAST_GAIN = 256
"""Keys that sharing a prefix must save in a step; below it a second average costs more."""


@dataclass(kw_only=True, eq=False)
class RunningSequence:
    """A sequence being decoded."""

    request: SampleRequest
    index: int
    """Index among the request's samples."""
    length: int
    """Tokens whose keys and values are stored: all but the last sampled one."""
    numbers: Iterator[float]
    """One for every token."""
    prefix: SharedPrefix | None = None
    """The prefix that it shares."""
    current: bool = True
    """Whether what it computed may be reused, see `SequenceTable.forget`."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    alternatives: list[Alternatives] = field(default_factory=list[Alternatives])
    """The most probable others of every token, where any are asked for."""

    @property
    def num_own(self) -> int:
        """Tokens whose keys and values are in the row."""
        return self.length - prefix_length(self.prefix)

    def stop_reason(self) -> tinker.StopReason | None:
        """The reason why the sample ends after its last token, or ``None`` if it goes on."""
        if self.request.stop.ends(self.tokens):
            return "stop"
        return "length" if len(self.tokens) >= self.request.max_tokens else None

    def tell(self, stop_reason: str | None) -> None:
        """Hand the last token to whoever listens to the request."""
        if self.request.listener is None:
            return
        self.request.listener(
            Drawn(
                index=self.index,
                token=self.tokens[-1],
                logprob=self.logprobs[-1],
                alternatives=self.alternatives[-1] if self.alternatives else None,
                stop_reason=stop_reason,
            )
        )

    def sampled(self, stop_reason: tinker.StopReason) -> tinker.SampledSequence:
        """The finished sample."""
        topk = None
        if self.alternatives:
            ids, logprobs = zip(*self.alternatives, strict=True)
            topk = np.stack(ids), np.stack(logprobs)
        return make_sequence(
            stop_reason=stop_reason,
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
    """Samples of each request that start now."""
    past: int
    """Leading tokens taken from `source`."""
    source: PrefixNode | None
    prefix: SharedPrefix | None = None
    """These tokens, if they are shared and not copied."""

    @property
    def tokens(self) -> np.ndarray:
        """Token ids the model reads."""
        return self.requests[0].fed

    @property
    def num_new(self) -> int:
        """Tokens to compute."""
        return len(self.tokens) - self.past

    @property
    def num_own(self) -> int:
        """Tokens whose keys and values are in the row."""
        return len(self.tokens) - prefix_length(self.prefix)


class SequenceTable:
    """Running sequences, their key-value store, and the prefixes that can be found again."""

    def __init__(self, max_saved_bytes: int) -> None:
        self.sequences: list[RunningSequence] = []
        self.cache = RaggedCache(rows=1)
        """Keys and values of the sequences, a row each."""
        self.prefilled = RaggedCache(rows=1)
        """Keys and values of the prompts at work; apart, or rows that share their beginnings would be as long."""
        self._max_saved_bytes = max_saved_bytes
        self.forget()

    def forget(self) -> None:
        """Forget all that was computed: prefixes, and what no running sequence needs."""
        self._stored = PrefixCache(self._max_saved_bytes)
        self.free_prompts()
        if not self.sequences:
            self.cache = RaggedCache(rows=1)
        for sequence in self.sequences:
            sequence.current = False

    def lookup(self, request: SampleRequest) -> tuple[int, PrefixNode | None]:
        """The longest stored prefix of the prompt: its length in tokens, and where it is."""
        blocks, node = self._stored.find(request.digests[: request.reusable // BLOCK])
        return blocks * BLOCK, node

    def load(self, prompts: Sequence[Prompt]) -> None:
        """Give these prompts their stored prefixes: shared where several sequences have one, else copied."""
        askers: dict[bytes, list[Prompt]] = {}
        for prompt in prompts:
            if prompt.source is not None:
                askers.setdefault(prompt.requests[0].digests[prompt.past // BLOCK - 1], []).append(prompt)
        for digest, sharing in askers.items():
            prefix = self._shared(digest, sharing)
            for prompt in sharing:
                prompt.prefix = prefix
        pasts = [prompt.past - prefix_length(prompt.prefix) for prompt in prompts]
        self.prefilled.renew(len(prompts), max(pasts) + max(prompt.num_new for prompt in prompts))
        for row, prompt in enumerate(prompts):
            if prompt.source is not None and prompt.prefix is None:
                begin = 0
                for part in prompt.source.parts_up_to(prompt.past // BLOCK):
                    self.prefilled.write_row(row, part, begin)
                    begin += part[0].shape[2]

    def start(self, prompts: Sequence[Prompt], expected: int) -> list[int]:
        """Start the sequences of prompts whose keys and values lie in the rows of `prefilled`.

        There will be `expected` running together when what waits has started. Room for them is made at once.

        Returns:
            The index of its prompt for every new sequence.
        """
        cuts = [self._settle(row, prompt) for row, prompt in enumerate(prompts)]
        origins: list[int] = []
        num_rows = len(self.sequences) + sum(sum(prompt.samples) for prompt in prompts)
        make_room = self.cache.reserve if self.sequences else self.cache.renew
        make_room(max(num_rows, expected), max(prompt.num_own for prompt in prompts) + 1)
        for row, prompt in enumerate(prompts):
            if not sum(prompt.samples):
                continue
            own = self.prefilled.read_row(row, cuts[row], cuts[row] + prompt.num_own)
            for request, count in zip(prompt.requests, prompt.samples, strict=True):
                for sample in range(request.started, request.started + count):
                    self.cache.write_row(len(self.sequences), own)
                    self.sequences.append(
                        RunningSequence(
                            request=request,
                            index=sample,
                            length=len(request.prompt),
                            numbers=uniform_numbers(request.seed, sample),
                            prefix=prompt.prefix,
                        )
                    )
                    origins.append(row)
                request.started += count
        return origins

    def retire(self, slots: Sequence[int], *, keep: bool) -> None:
        """Take sequences out of the batch; with ``keep`` what they computed can be found again."""
        for slot in sorted(slots, reverse=True):
            sequence = self.sequences[slot]
            if keep and sequence.current:
                tokens = np.concatenate(
                    [sequence.request.prompt, np.asarray(sequence.tokens, dtype=np.int64)]
                )
                digests = block_digests(tokens[: sequence.length], sequence.request.client)
                self._save(self.cache, slot, digests, sequence.prefix)
            if not keep:
                self.cache.clear_row(slot)
            last = self.sequences.pop()
            if last is not sequence:
                self.cache.copy_row(len(self.sequences), slot, last.num_own)
                self.sequences[slot] = last

    def free_prompts(self) -> None:
        """Free the store of prompts, until the next ones are loaded."""
        self.prefilled = RaggedCache(rows=1)

    def shrink(self) -> None:
        """Free the key-value stores of an idle decoder; that of sequences if it is larger than all saved prefixes."""
        if not self.sequences:
            self.free_prompts()
            if self.cache.num_bytes > self._max_saved_bytes:
                self.cache = RaggedCache(rows=1)

    def _shared(self, digest: bytes, prompts: Sequence[Prompt]) -> SharedPrefix | None:
        """The shared prefix of prompts with the same stored one, if sharing it is worth while.

        Running sequences that have a copy of it give it up.
        """
        source, length = prompts[0].source, prompts[0].past
        if source is None:
            return None
        for sequence in self.sequences:
            if sequence.current and sequence.prefix is not None and sequence.prefix.digest == digest:
                return sequence.prefix
        blocks = length // BLOCK
        copies = [
            slot
            for slot, sequence in enumerate(self.sequences)
            if sequence.current
            and sequence.prefix is None
            and digest in sequence.request.digests[blocks - 1 : blocks]
        ]
        if (len(prompts) + len(copies) - 1) * length < LEAST_GAIN:
            return None
        prefix = SharedPrefix(digest=digest, states=source.states_up_to(blocks), length=length)
        for slot in copies:
            sequence = self.sequences[slot]
            self.cache.cut_row(slot, length, sequence.length)
            sequence.prefix = prefix
        return prefix

    def _settle(self, row: int, prompt: Prompt) -> int:
        """Save a prompt that was just computed, and share it if several samples start from it.

        Returns:
            The tokens of its row that the shared prefix has now, too.
        """
        digests = prompt.requests[0].digests
        blocks = len(prompt.tokens) // BLOCK
        node = self._save(self.prefilled, row, digests[:blocks], prompt.prefix)
        first, length = prefix_length(prompt.prefix), blocks * BLOCK
        if node is None or (sum(prompt.samples) - 1) * length < LEAST_GAIN or length <= first:
            return 0
        prompt.prefix = SharedPrefix(
            digest=digests[blocks - 1], states=node.states_up_to(blocks), length=length
        )
        return length - first

    def _save(
        self, store: RaggedCache, row: int, digests: list[bytes], prefix: SharedPrefix | None
    ) -> PrefixNode | None:
        """Keep a row's blocks for later prompts; the node in which they end."""

        def read(first: int, last: int) -> list[torch.Tensor]:
            depth = prefix_length(prefix)
            own = store.read_row(row, max(0, first - depth), last - depth)
            if prefix is None or first >= depth:
                return [state.clone() for state in own]
            pairs = zip(prefix.states, own, strict=True)
            return [torch.cat([begun[:, :, first:], rest], dim=2) for begun, rest in pairs]

        return self._stored.add(digests, read) if digests else None


def prefix_length(prefix: SharedPrefix | None) -> int:
    """Tokens of a shared prefix, 0 if there is none."""
    return 0 if prefix is None else prefix.length
