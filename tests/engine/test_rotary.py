"""Rotary settings are written so that old and new versions of transformers read the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig

from viva.model_files import spell_rotary_twice

LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def phi() -> Any:
    return transformers.PhiConfig(rope_parameters={"rope_theta": 2e4, "partial_rotary_factor": 0.25})


def gemma_3() -> Any:
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    return transformers.Gemma3TextConfig(
        rope_parameters={
            "full_attention": linear,
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        }
    )


CASES: list[tuple[Any, dict[str, Any]]] = [
    (
        lambda: transformers.Qwen3Config(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
        {"rope_theta": 1e6, "rope_scaling": None},
    ),
    (
        lambda: transformers.LlamaConfig(
            rope_parameters={"rope_theta": 5e5, **LLAMA_3}, max_position_embeddings=512
        ),
        {"rope_theta": 5e5, "rope_scaling": LLAMA_3},
    ),
    (phi, {"rope_theta": 2e4, "rope_scaling": None, "partial_rotary_factor": 0.25}),
    (
        gemma_3,
        {
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_local_base_freq": 1e4,
        },
    ),
    (lambda: transformers.GPT2Config(), {}),
]


@pytest.mark.parametrize(("make", "expected"), CASES)
def test_both_spellings_stand_in_the_file_and_are_read_as_one(
    make: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path)
    plain: Any = AutoConfig.from_pretrained(tmp_path)
    spell_rotary_twice(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {
        key: value for key, value in written.items() if key in ("rope_theta", "rope_scaling", *expected)
    } == expected
    again: Any = AutoConfig.from_pretrained(tmp_path)
    assert again.to_dict().get("rope_parameters") == plain.to_dict().get("rope_parameters")
