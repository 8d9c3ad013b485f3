"""Continuous batching: all pending samples of one snapshot, or of adapters over one base, are decoded together.

Samples join at any step: waiting prompts are prefilled in batches of similar length, equal prompts and known
prefixes only once. They leave when they end.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tinker
import torch
from torch.nn.utils.rnn import pad_sequence

from viva.engine.adapters import AdapterRows
from viva.engine.model import head_logits, output_layer
from viva.engine.replay import DecodeSteps, Recorder
from viva.engine.requests import BLOCK, SampleRequest, not_finite, score_prompt
from viva.engine.sampling import draw_tokens
from viva.engine.scheduler import EngineLimits
from viva.engine.sequences import Prompt, RunningSequence, SequenceTable, prefix_length
from viva.sdk import make_response

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_PADDING = 128
"""Padded tokens in a prefill batch. More of them cost as much as reading the weights once more for another batch."""


class Decoder:
    """Serves the sampling requests of one snapshot, or of all adapters of a base model.

    Args:
        get_module: Gives a decode copy when there is work.
        device: To compute on.
        limits: Of batches and memory.
        recorder: Records steps, where there is one.
        rows: Of a copy that computes each row by its request's adapter.
    """

    priority = 1

    def __init__(
        self,
        get_module: Callable[[], "PreTrainedModel"],
        device: torch.device,
        limits: EngineLimits,
        recorder: Recorder | None = None,
        rows: AdapterRows | None = None,
    ) -> None:
        self._get_module = get_module
        self._device = device
        self._limits = limits
        self._rows = rows
        self._module: Any = None
        self._inbox: deque[SampleRequest] = deque()
        """Requests as they come, from any thread; all else belongs to the thread that works."""
        self._pending: deque[SampleRequest] = deque()
        self._running = SequenceTable(limits.prefix_cache_bytes)
        self._steps = DecodeSteps(recorder)
        self._at_work: list[SampleRequest] = []

    def add(self, request: SampleRequest) -> None:
        """Queue a request, from any thread. The caller tells the pump."""
        self._inbox.append(request)

    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._inbox or self._pending or self._running.sequences)

    @torch.inference_mode()
    def run_unit(self) -> bool:
        """One prefill batch if prompts wait and rows are free, else one decode step."""
        while self._inbox:
            self._pending.append(self._inbox.popleft())
        waiting = [*self._pending, *(sequence.request for sequence in self._running.sequences)]
        self._drop([request for request in waiting if request.future.cancelled()])
        self._at_work = list(self._pending)
        if self._module is None and self.has_work():
            self._module = self._get_module()
        prompts = self._next_prompts()
        if prompts:
            self._at_work = [request for prompt in prompts for request in prompt.requests]
            completed = self._prefill(prompts)
        else:
            self._running.free_prompts()
            self._at_work = [sequence.request for sequence in self._running.sequences]
            completed = bool(self._at_work) and self._decode()
        self._rest()
        return completed

    def forget(self) -> None:
        """Reuse nothing that was computed so far; live samples go on."""
        self._running.forget()

    @torch.inference_mode()  # keys and values that were computed in it can be changed in it only
    def fail(self, error: BaseException) -> None:
        """Fail the requests of the unit at work."""
        for request in self._at_work:
            request.future.reject(error)
        self._running.free_prompts()  # what a pass that failed has stored there is not whole
        self._drop(self._at_work)
        self._rest()

    def _speak_for(self, requests: Sequence[SampleRequest]) -> None:
        """Let the next rows be computed by the adapters of these requests."""
        if self._rows is not None:
            self._rows.set([request.adapter for request in requests if request.adapter is not None])

    def _rest(self) -> None:
        """Release weights and recordings while there is no work."""
        if not self.has_work():
            self._module = None
            self._steps.forget()
            self._running.shrink()

    def _drop(self, requests: Sequence[SampleRequest]) -> None:
        if requests:
            gone = {id(request) for request in requests}
            self._pending = deque(request for request in self._pending if id(request) not in gone)
            slots = [
                slot for slot, sequence in enumerate(self._running.sequences) if id(sequence.request) in gone
            ]
            self._running.retire(slots, keep=False)

    def _next_prompts(self) -> list[Prompt]:
        """The next batch: of the prompts that find a row, the longest with others of similar length.

        A prompt that shares a prefix, not known yet, with one of the batch waits for the next batch, where it is known.
        """
        candidates = self._candidates()
        candidates.sort(key=lambda prompt: -prompt.num_new)
        batch: list[Prompt] = []
        upcoming: set[bytes] = set()
        padding = 0
        for prompt in candidates:
            if batch and (len(batch) + 1) * batch[0].num_new > self._limits.prefill_tokens:
                break
            request = prompt.requests[0]
            next_block = request.digests[prompt.past // BLOCK :][:1]
            if prompt.past + BLOCK <= request.reusable and upcoming.intersection(next_block):
                continue
            padding += batch[0].num_new - prompt.num_new if batch else 0
            if padding > _MOST_PADDING:
                break
            upcoming.update(next_block)
            batch.append(prompt)
        return batch

    def _candidates(self) -> list[Prompt]:
        """Pending requests that find a row, in order of submission, those with equal prompts together."""
        free = self._limits.decode_rows - len(self._running.sequences)
        prompts: dict[tuple[str, bytes, int], Prompt] = {}
        for request in self._pending:
            samples = min(request.waiting, free)
            if request.waiting and not samples:
                break
            free -= samples
            key = (request.client, request.fed.tobytes(), request.reusable)
            if key not in prompts:
                past, source = self._running.lookup(request)
                prompts[key] = Prompt(requests=[], samples=[], past=past, source=source)
            prompts[key].requests.append(request)
            prompts[key].samples.append(samples)
        return list(prompts.values())

    def _prefill(self, prompts: list[Prompt]) -> bool:
        tokens = [torch.from_numpy(prompt.tokens[prompt.past :]) for prompt in prompts]
        start = len(self._running.sequences)
        self._running.load(prompts)
        is_scored = any(request.unscored for prompt in prompts for request in prompt.requests)
        ends = [prompt.num_new - 1 for prompt in prompts]
        self._speak_for([prompt.requests[0] for prompt in prompts])
        hidden = self._running.prefilled.forward(
            self._module,
            pad_sequence(tokens, batch_first=True).to(self._device),
            past=[prompt.past - prefix_length(prompt.prefix) for prompt in prompts],
            prefixes=[prompt.prefix for prompt in prompts],
            ends=None if is_scored else ends,
        )
        lost = self._score(prompts, hidden)
        # all that go on after their first token will be live together, since prompts go before decoding
        staying = sum(request.waiting for request in self._pending if request.max_tokens > 1)
        origins = self._running.start(prompts, min(self._limits.decode_rows, start + staying))
        requests = [request for prompt in prompts for request in prompt.requests]
        done = {id(request) for request in requests if not request.waiting}
        self._pending = deque(request for request in self._pending if id(request) not in done)
        lines, last = (torch.tensor(each, device=self._device) for each in (range(len(prompts)), ends))
        final = hidden[lines, last] if is_scored else hidden[:, 0]
        completed = self._advance(start, final[torch.tensor(origins, dtype=torch.int64, device=self._device)])
        for request in requests:
            if not request.max_tokens:
                request.future.resolve(make_response([], request.prompt_fields))
                completed = True
        if lost:
            self._running.forget()
            self._drop(lost)
        return completed

    def _score(self, prompts: list[Prompt], hidden: torch.Tensor) -> list[SampleRequest]:
        """Fill in what the requests ask to know about their prompts; return those whose logits are not finite."""
        lost: list[SampleRequest] = []
        for line, prompt in zip(hidden, prompts, strict=True):
            for request in prompt.requests:
                scoring = request.unscored
                if scoring is not None:
                    self._speak_for([request])
                    span = line[scoring.first - 1 - prompt.past : len(request.prompt) - 1 - prompt.past]
                    try:
                        request.prompt_fields = score_prompt(
                            self._module, span, request.prompt, scoring, self._limits.logits
                        )
                    except FloatingPointError as error:
                        request.future.reject(error)
                        lost.append(request)
        return lost

    def _decode(self) -> bool:
        sequences = self._running.sequences
        self._speak_for([sequence.request for sequence in sequences])
        hidden = self._steps.forward(
            self._running.cache,
            self._module,
            tokens=[sequence.tokens[-1] for sequence in sequences],
            past=[sequence.num_own for sequence in sequences],
            prefixes=[sequence.prefix for sequence in sequences],
        )
        for sequence in sequences:
            sequence.length += 1
        return self._advance(0, hidden)

    def _advance(self, start: int, hidden: torch.Tensor) -> bool:
        """Draw the next token of the sequences from ``start`` on, given their last hidden states ``[B, H]``."""
        sequences = self._running.sequences[start:]
        if not sequences:
            return False
        size = max(1, self._limits.logits // output_layer(self._module).out_features)
        finite: list[bool] = []
        for first in range(0, len(sequences), size):
            finite += self._draw(sequences[first : first + size], hidden[first : first + size])
        ended: set[int] = set()
        lost: list[SampleRequest] = []
        for sequence, is_finite in zip(sequences, finite, strict=True):
            if not is_finite:
                sequence.request.future.reject(not_finite(f"after {sequence.length} tokens"))
                lost.append(sequence.request)
                continue
            reason = sequence.stop_reason()
            sequence.tell(reason)
            if reason is not None:
                ended.add(id(sequence))
                self._finish(sequence, reason)
        if lost:
            self._running.forget()  # what is not a number may be among what was stored
            self._drop(lost)
        slots = [slot for slot, sequence in enumerate(self._running.sequences) if id(sequence) in ended]
        self._running.retire(slots, keep=True)
        return bool(ended or lost)

    def _draw(self, sequences: Sequence[RunningSequence], hidden: torch.Tensor) -> list[bool]:
        """Append the next token of these sequences; return whether their logits were finite."""
        self._speak_for([sequence.request for sequence in sequences])
        draws = draw_tokens(
            head_logits(self._module, hidden),
            [sequence.request.params for sequence in sequences],
            [next(sequence.numbers) for sequence in sequences],
            max(sequence.request.topk_samples for sequence in sequences),
        )
        for position, sequence in enumerate(sequences):
            sequence.tokens.append(draws.tokens[position])
            sequence.logprobs.append(draws.logprobs[position])
            wanted = sequence.request.topk_samples
            if wanted and draws.alternatives is not None:
                ids, logprobs = draws.alternatives
                sequence.alternatives.append((ids[position, :wanted], logprobs[position, :wanted]))
        return draws.finite

    def _finish(self, sequence: RunningSequence, stop_reason: tinker.StopReason) -> None:
        request = sequence.request
        request.finished[sequence.index] = sequence.sampled(stop_reason)
        if len(request.finished) == request.num_samples:
            sequences = [request.finished[index] for index in range(request.num_samples)]
            request.future.resolve(make_response(sequences, request.prompt_fields))
