"""Decode steps that are recorded once and replayed, with a recorder of torch's operations in place of a GPU's.

Like a CUDA graph, it replays operations on the memory they were recorded with, whatever Python would have decided by
then, and refuses what waits for a result.
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tiny_engine import EOS, FAMILIES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from viva.engine import EngineLimits, LocalServiceClient, attention, core, replay
from viva.engine.model import load_base_model

WAITING = ("_local_scalar_dense", "aten.item", "nonzero")


class Tape(TorchDispatchMode):
    """Writes down every operation that computes, with what it read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in WAITING):
            raise RuntimeError(f"{func} waits for its result")
        output = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, output))
        return output

    def play(self) -> None:
        for func, args, kwargs, output in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(output), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeRecorder(replay.Recorder):
    """Records on a CPU."""

    def __init__(self) -> None:
        self.is_usable = True
        self.reasons: list[str] = []
        self.num_recorded = self.num_replayed = 0

    def record(self, run: replay.Run) -> tuple[torch.Tensor, replay.Run]:
        output = run()
        with Tape() as tape:
            replayed = run()
        self.num_recorded += 1

        def play() -> torch.Tensor:
            self.num_replayed += 1
            tape.play()
            return replayed

        return output, play

    def give_up(self, reason: str) -> None:
        self.is_usable = False
        self.reasons.append(reason)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither compiled kernels nor fused layers, which are for a CPU."""
    monkeypatch.setattr(attention, "can_compile", lambda tensor: False)
    monkeypatch.setattr(core, "fuse_layers", lambda module, join: module)
    monkeypatch.setattr(core, "pack_linears", lambda module, join: module)


Asked = list[tuple[list[int], int, int]]
"""Prompts, each with a number of samples and their length."""

ASKED: dict[str, Asked] = {
    "alike": [([7] * 20, 5, 70)],
    "ragged": [([index + 1] * (5 + index), 1, 8 + 5 * index) for index in range(11)],
    "long and short": [([3] * 150, 20, 12), *(([index] * 4, 1, 12) for index in range(30))],
    "a shared beginning": [([5] * 100, 12, 30), ([9] * 40, 3, 40)],
}


def sample(service: LocalServiceClient, folder: str, asked: Asked, recorder: Any) -> tuple[list[Any], Any]:
    """All sequences, and the decoder."""
    sampler: Any = service.create_sampling_client(base_model=folder)
    decoder = sampler._source.result().decoder
    decoder._steps = replay.DecodeSteps(recorder)
    futures = [
        sampler.sample(
            tinker.ModelInput.from_ints(tokens),
            num_samples,
            tinker.SamplingParams(max_tokens=length, seed=seed, stop=[EOS + 3]),
        )
        for seed, (tokens, num_samples, length) in enumerate(asked)
    ]
    return [sequence for future in futures for sequence in future.result().sequences], decoder


def assert_scored(service: LocalServiceClient, folder: str, asked: Asked, sequences: list[Any]) -> None:
    """Every token has the logprob that it has as a part of a prompt, which no decode step computes."""
    sampler: Any = service.create_sampling_client(base_model=folder)
    prompts = [tokens for tokens, num_samples, _ in asked for _ in range(num_samples)]
    texts = [
        tinker.ModelInput.from_ints([*prompt, *sequence.tokens])
        for prompt, sequence in zip(prompts, sequences, strict=True)
    ]
    futures = [sampler.compute_logprobs(text) for text in texts]
    for prompt, sequence, future in zip(prompts, sequences, futures, strict=True):
        np.testing.assert_allclose(sequence.logprobs, future.result()[len(prompt) :], atol=1e-4)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_give_the_logprobs_of_whole_texts(
    family: str, asked: str, model_dir: Callable[[str], str]
) -> None:
    recorder = TapeRecorder()
    service = LocalServiceClient(device="cpu", limits=EngineLimits(decode_rows=32))
    found, decoder = sample(service, model_dir(family), ASKED[asked], recorder)
    assert_scored(service, model_dir(family), ASKED[asked], found)
    assert recorder.is_usable, recorder.reasons
    assert recorder.num_replayed > 2 * recorder.num_recorded > 0
    assert not decoder._steps._recordings  # nor do they keep anything when there is no work


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_whose_replays_are_right_keeps_its_recorder(
    family: str, model_dir: Callable[[str], str]
) -> None:
    base, recorder = load_base_model(model_dir(family), torch.device("cpu"), torch.float32), TapeRecorder()
    replay.check_replays(base, recorder)
    assert recorder.is_usable, recorder.reasons
    assert recorder.num_recorded == 1
    assert recorder.num_replayed >= 3


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_model_whose_replays_go_wrong_loses_it(
    model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    move = replay.RaggedStep.move

    def stuck(self: Any, past: Any) -> None:
        self.positions = self.places = self.places.clone()  # what was recorded reads the memory before
        move(self, past)

    monkeypatch.setattr(replay.RaggedStep, "move", stuck)
    recorder, service = TapeRecorder(), LocalServiceClient(device="cpu")
    monkeypatch.setattr(service._core, "_recorder", recorder)
    service.create_sampling_client(base_model=model_dir("llama"))
    assert "was off by" in recorder.reasons[0]
    assert not recorder.is_usable


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_cannot_be_recorded_is_computed_call_by_call(
    model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replay.RaggedCache.run

    def waiting(self: Any, module: Any, tokens: torch.Tensor, step: Any) -> torch.Tensor:
        tokens.sum().item()
        return run(self, module, tokens, step)

    recorder = TapeRecorder()
    service = LocalServiceClient(device="cpu")
    monkeypatch.setattr(replay.RaggedCache, "run", waiting)
    found, _ = sample(service, model_dir("llama"), ASKED["alike"], recorder)
    assert len(recorder.reasons) == 1
    assert "waits for its result" in recorder.reasons[0]
    assert_scored(service, model_dir("llama"), ASKED["alike"], found)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_few_recordings_are_kept(model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_REPEATS", 1)
    recorder, kept = TapeRecorder(), list[int]()
    record = recorder.record

    service = LocalServiceClient(device="cpu")
    sampler: Any = service.create_sampling_client(base_model=model_dir("llama"))
    steps = replay.DecodeSteps(recorder)
    sampler._source.result().decoder._steps = steps

    def counting(run: replay.Run) -> tuple[torch.Tensor, replay.Run]:
        kept.append(len(steps._recordings))
        return record(run)

    monkeypatch.setattr(recorder, "record", counting)
    futures = [
        sampler.sample(
            tinker.ModelInput.from_ints([8] * 5),
            8,
            tinker.SamplingParams(max_tokens=length, seed=length, stop=[EOS + 3]),
        )
        for length in range(3, 9)  # every step ends eight rows
    ]
    assert sum(len(future.result().sequences) for future in futures) == 48
    assert len(kept) == 6
    assert max(kept) == replay._MOST_KEPT


def test_a_gpu_that_cannot_record_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    recorder = replay.Recorder(torch.device("cuda"))
    with caplog.at_level(logging.WARNING):
        recorder.give_up("it is too old")
        recorder.give_up("it is too old")
    assert not recorder.is_usable
    [message] = [record.getMessage() for record in caplog.records]
    assert "cuda, which is slower: it is too old. Results are the same." in message


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of CUDA, in place of it."""
    found: list[str] = []

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.name = "side"

        def wait_stream(self, other: Any) -> None:
            found.append(f"{self.name} waits for {other.name}")

    class Graph:
        def capture_begin(self, capture_error_mode: str) -> None:
            found.append(f"begin {capture_error_mode}")

        def capture_end(self) -> None:
            found.append("end")

        def replay(self) -> None:
            found.append("replay")

    @contextmanager
    def on(stream: Stream) -> Generator[None]:
        found.append(f"on {stream.name}")
        yield
        found.append(f"off {stream.name}")

    main = Stream()
    main.name = "main"
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: found.append(f"kept for {stream.name}")
    )
    return found


def test_a_graph_is_recorded_beside_the_stream_that_waits_for_it(events: list[str]) -> None:
    recorder, outputs = replay.Recorder(torch.device("cuda")), iter(torch.eye(2))

    def run() -> torch.Tensor:
        events.append("run")
        return next(outputs)

    output, play = recorder.record(run)
    assert events == [
        "side waits for main",
        "on side",
        "run",
        "kept for main",
        "begin thread_local",
        "run",
        "end",
        "off side",
        "main waits for side",
    ]
    assert output.tolist() == [1, 0]
    assert play().tolist() == [0, 1]
    assert events[-1] == "replay"


def test_a_recording_that_fails_is_ended(events: list[str]) -> None:
    def run() -> torch.Tensor:
        events.append("run")
        if events.count("run") == 2:
            raise RuntimeError("it waits")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="it waits"):
        replay.Recorder(torch.device("cuda")).record(run)
    assert events[-2:] == ["end", "main waits for side"]
