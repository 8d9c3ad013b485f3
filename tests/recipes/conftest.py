"""A random model and problems that whole runs of several recipes are tried on."""

from pathlib import Path

import pytest
import torch
from random_models import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose judge hesitates between A and B: one that is sure of a place prefers nothing."""
    folder = make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        rows = model.lm_head.weight
        a, b = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["A", "B"])
        rows[a] = rows[b] + 10 * rows[1]
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    path.write_text("".join(f'{{"query": "{n} + 1?", "answer": {n + 1}}}\n' for n in range(4)))
    return path
