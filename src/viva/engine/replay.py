"""Decode steps that a GPU replays.

A decode step is some hundred small kernels, which take longer to launch one by one than to run. CUDA can record the
launches once and replay them as one (a CUDA graph). A recording computes with the memory it was made with, so it serves
the steps that differ in what this memory holds: which tokens, at which places. Steps are of one *kind* if they have the
same weights, store, shared prefixes and number of rows, and lengths that round up to the same.

Shapes: ``B`` rows, ``H`` hidden size.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from viva.engine.attention import RaggedCache
from viva.engine.model import BaseModel, deviation
from viva.engine.step import RaggedStep, SharedPrefix, attended_groups

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

_REPEATS = 3
"""Steps of one kind in a row before one is recorded: recording costs two, and kinds change when rows come or go."""
_MOST_KEPT = 4
"""Recordings of one decoder; each keeps the prefixes that its rows shared."""
_PROBE = 8
"""Tokens of the texts that a model is tried with, and that are decoded of it."""
_ROUND_ROWS = 8
"""Rows are made up to multiples of this by idle ones, so that fewer kinds arise as rows end."""

Run = Callable[[], torch.Tensor]


class Recorder:
    """Records what a function computes, as CUDA graphs on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.is_usable = True
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def record(self, run: Run) -> tuple[torch.Tensor, Run]:
        """The result of ``run``, and a function that computes it again from what memory then holds.

        Raises:
            RuntimeError: Something that ``run`` does cannot be recorded, such as waiting for the GPU.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream = self._stream or torch.cuda.Stream(self._device)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                output = run()  # what libraries prepare at a first call must not be recorded
                output.record_stream(current)
                # other threads of the process may use the GPU meanwhile
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    replayed = run()
                finally:
                    graph.capture_end()
        finally:
            current.wait_stream(self._stream)

        def replay() -> torch.Tensor:
            graph.replay()
            return replayed

        return output, replay

    def give_up(self, reason: str) -> None:
        """Record nothing from now on. Says so once."""
        if self.is_usable:
            _log.warning(
                "Decode steps are not replayed as CUDA graphs on %s, which is slower: %s. Results are the same.",
                self._device,
                reason,
            )
        self.is_usable = False


class DecodeSteps:
    """The decode steps of one decoder: call by call, or replayed where a recorder is given."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self.forget()

    def forget(self) -> None:
        """Drop all recordings, and with them what they keep."""
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._memory: object = None
        self._kind: Hashable = None
        self._repeats = 0

    def forward(
        self,
        cache: RaggedCache,
        module: "PreTrainedModel",
        tokens: Sequence[int],
        past: Sequence[int],
        prefixes: Sequence[SharedPrefix | None],
    ) -> torch.Tensor:
        """`RaggedCache.forward` on one new token of each of the first ``B`` rows; those behind them are not in use.

        Returns:
            Hidden states after the final norm, ``[B, H]``. They may be overwritten by the next step.
        """
        if self._recorder is not None and self._recorder.is_usable:
            cache.reserve(len(past), max(past) + 1)
            if cache.memory is not self._memory:
                self.forget()
                self._memory = cache.memory
            idle = min(-len(past) % _ROUND_ROWS, cache.rows - len(past))
            filled = [*tokens, *[0] * idle], [*past, *[0] * idle], [*prefixes, *[prefixes[-1]] * idle]
            hidden = self._replayed(self._recorder, cache, module, *filled)
            if hidden is not None:
                return hidden[: len(past)]
        given = torch.tensor(tokens, device=module.device)[:, None]
        return cache.forward(module, given, past=past, prefixes=prefixes)[:, 0]

    def _replayed(
        self,
        recorder: Recorder,
        cache: RaggedCache,
        module: "PreTrainedModel",
        tokens: Sequence[int],
        past: Sequence[int],
        prefixes: Sequence[SharedPrefix | None],
    ) -> torch.Tensor | None:
        """The step's hidden states, or ``None`` if it is one to compute by calls."""
        groups = tuple((rows.start, length) for rows, length in attended_groups(past, 1, is_fixed=True))
        kind = (id(module), len(past), groups, tuple(map(id, prefixes)))
        self._repeats = self._repeats + 1 if kind == self._kind else 1
        self._kind = kind
        recording = self._recordings.get(kind)
        if recording is None:
            if self._repeats < _REPEATS:
                return None
            recording = self._recordings[kind] = _Recording(cache, module, past, prefixes)
            if len(self._recordings) > _MOST_KEPT:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(kind)
        recording.set(tokens, past)
        try:
            return recording.compute(recorder)
        except RuntimeError as error:
            recorder.give_up(f"{type(error).__name__}: {error}")
            self.forget()
            return None


@torch.inference_mode()
def check_replays(base: BaseModel, recorder: Recorder) -> None:
    """Decode two short rows of a model with a recorder and without; give up recording if that differs."""
    module = base.decode_copy()
    text = torch.arange(1, 2 * _PROBE) % base.vocab_size
    caches = RaggedCache(rows=2), RaggedCache(rows=2)
    ways = DecodeSteps(recorder), DecodeSteps(None)
    for cache in caches:
        cache.forward(module, text[None, :_PROBE].repeat(2, 1).to(module.device), past=[0, 0])
    for length in range(_PROBE, len(text)):
        tokens, past = text[[length, length - 2]].tolist(), [length, length - 2]
        replayed, computed = (
            steps.forward(cache, module, tokens, past, [None, None])
            for steps, cache in zip(ways, caches, strict=True)
        )
        error = deviation(replayed, computed, module.dtype)
        if error is not None:
            recorder.give_up(f"a replayed step of {base.name!r} was off by {error:.3g}")


class _Recording:
    """A step that can be computed again with other tokens at other places.

    It is recorded when it is first computed.
    """

    def __init__(
        self,
        cache: RaggedCache,
        module: "PreTrainedModel",
        past: Sequence[int],
        prefixes: Sequence[SharedPrefix | None],
    ) -> None:
        self._cache, self._module = cache, module
        self._step = RaggedStep(past, 1, module.device, prefixes, is_fixed=True)
        self._tokens = torch.zeros(len(past), 1, dtype=torch.int64, device=module.device)
        self._replay: Run | None = None

    def set(self, tokens: Sequence[int], past: Sequence[int]) -> None:
        """Set the next tokens and their places."""
        self._tokens.copy_(torch.tensor(tokens)[:, None])
        self._step.move(past)

    def compute(self, recorder: Recorder) -> torch.Tensor:
        """Hidden states ``[B, H]`` of the step as it is set."""
        if self._replay is None:
            hidden, self._replay = recorder.record(self._run)
            return hidden
        return self._replay()

    def _run(self) -> torch.Tensor:
        return self._cache.run(self._module, self._tokens, self._step)[:, 0]
