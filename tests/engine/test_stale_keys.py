"""No keys of other weights are ever served: optimiser steps, loads and other adapters on one base model."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_engine import ints, params, supervised, train

from viva.engine import LocalServiceClient
from viva.engine.sequences import PrefixCache, SequenceTable

NUM_SCORED = 4
CHECKS = 20


def play(trial: int, folder: str, state_dir: Path) -> None:
    """Random operations on two adapters. After each, samplers of all ages score ends of texts they have seen before."""
    dice = random.Random(trial)
    service = LocalServiceClient(device="cpu", state_dir=state_dir)
    opening = [dice.randrange(200) for _ in range(33)]
    texts = [opening + [dice.randrange(200) for _ in range(dice.randrange(5, 20))] for _ in range(3)]
    trainers = [service.create_lora_training_client(folder, rank=2, seed=seed) for seed in range(2)]
    states: list[tuple[Any, str]] = []
    samplers: list[tuple[Any, list[np.ndarray]]] = []

    def snapshot(trainer: Any) -> None:
        outputs = (
            trainer.forward([supervised(text) for text in texts], "cross_entropy").result().loss_fn_outputs
        )
        seen = [np.array(output["logprobs"].data)[-NUM_SCORED:] for output in outputs]
        samplers.append((trainer.save_weights_and_get_sampling_client(), seen))

    for trainer in trainers:
        train(trainer, texts, learning_rate=0.05)
        snapshot(trainer)
    for check in range(CHECKS):
        trainer = dice.choice(trainers)
        if check % 4 == 3:
            match dice.choice(["step", "save", "load"] if states else ["step", "save"]):
                case "step":
                    train(trainer, [dice.choice(texts)], steps=2, learning_rate=0.05)
                case "save":
                    states.append((trainer, trainer.save_state(f"{check}").result().path))
                case _:
                    trainer, path = dice.choice(states)
                    trainer.load_state(path).result()
            snapshot(trainer)
        (sampler, seen), index = dice.choice(samplers), dice.randrange(len(texts))
        response = sampler.sample(
            ints(texts[index]),
            dice.choice([1, 3]),
            params(max_tokens=2),
            include_prompt_logprobs=True,
            prompt_logprobs_last_n=NUM_SCORED,
        ).result()
        np.testing.assert_allclose(response.prompt_logprobs[-NUM_SCORED:], seen[index], atol=1e-4)


@pytest.mark.parametrize("trial", range(10))
def test_every_sampler_serves_its_own_weights(
    trial: int, model_dir: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("viva.engine.sequences.LEAST_GAIN", 1)
    play(trial, model_dir("qwen3"), tmp_path)


def test_the_check_fails_if_snapshots_are_not_kept_apart(
    model_dir: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyones = PrefixCache(2**28)
    monkeypatch.setattr(SequenceTable, "forget", lambda table: setattr(table, "_stored", everyones))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        play(0, model_dir("qwen3"), tmp_path)
