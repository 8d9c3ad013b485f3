"""Model folders: what they may not ask for, their digests, their rotary settings."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig

from viva.model_files import check_base, check_model_folder, model_digests, spell_rotary_twice


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"")
    return tmp_path


def index(folder: Path, content: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def differing(recorded: dict[str, str], found: dict[str, str]) -> list[str] | None:
    """Parts that `check_base` names; ``None`` if it could not compare."""
    try:
        return [] if check_base("it", recorded, "new", found, was="old") else None
    except ValueError as error:
        text = str(error)
        assert text.startswith("it belongs to another base model than 'new', which differs in its ")
        assert "which was 'old'" in text
        return [part for part in ("weights", "config", "tokenizer") if f"{part} (SHA-256 " in text]


def test_a_model_in_shards_is_taken(folder: Path) -> None:
    index(folder, {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
    check_model_folder(folder)


@pytest.mark.parametrize("shard", ["../a", "/etc/passwd", "a/b", "..", "", "a\0", 3, None])
def test_shards_elsewhere_are_refused(folder: Path, shard: object) -> None:
    index(folder, {"weight_map": {"x": "a.safetensors", "y": shard}})
    with pytest.raises(ValueError, match="it may name files beside it only"):
        check_model_folder(folder)


@pytest.mark.parametrize("content", [{}, {"weight_map": []}])
def test_an_index_without_shards_is_refused(folder: Path, content: object) -> None:
    index(folder, content)
    with pytest.raises(ValueError, match="has no weight_map"):
        check_model_folder(folder)


def test_a_damaged_index_is_refused(folder: Path) -> None:
    (folder / "pytorch_model.bin.index.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        check_model_folder(folder)


def test_an_adapter_beside_a_model_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds adapter_config\.json besides a model"):
        check_model_folder(folder)


def test_pickled_weights_are_refused_and_the_way_out_is_told(folder: Path) -> None:
    (folder / "a.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"as pickles, which can run code .* save_pretrained"):
        check_model_folder(folder)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder without config\.json"):
        check_model_folder(tmp_path)


def test_no_other_setting_names_a_file_elsewhere(folder: Path) -> None:
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({"tokenizer_file": "/at/its/authors/tokenizer.json", "vocab_file": None}))
    check_model_folder(folder)
    (folder.parent / "secret").write_text("x")
    settings.write_text(json.dumps({"tokenizer_file": "../secret"}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json' would have '\.\./secret' read"):
        check_model_folder(folder)
    settings.unlink()
    (folder / "config.json").write_text(json.dumps({"transformers_weights": "../a.safetensors"}))
    with pytest.raises(ValueError, match=r"config\.json' would have .* read"):
        check_model_folder(folder)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_a_damaged_configuration_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        check_model_folder(folder)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("a.safetensors", "weights"),
        ("config.json", "config"),
        ("generation_config.json", "config"),
        ("tokenizer.json", "tokenizer"),
        ("chat_template.jinja", "tokenizer"),
    ],
)
def test_a_change_of_a_file_is_one_of_its_part(folder: Path, name: str, part: str) -> None:
    (folder / "README.md").write_text("told")
    before = model_digests(str(folder))
    assert set(before) == {"weights", "config", "tokenizer"}
    (folder / "README.md").write_text("told otherwise")
    assert differing(before, model_digests(str(folder))) == []
    (folder / name).write_text('{"changed": 1}')
    assert differing(before, model_digests(str(folder))) == [part]


def test_files_of_a_tokenizer_count_where_they_are_read(folder: Path) -> None:
    (folder / "vocab.json").write_text("{}")
    slow = model_digests(str(folder))
    (folder / "vocab.json").write_text('{"a": 1}')
    assert differing(slow, model_digests(str(folder))) == ["tokenizer"]
    (folder / "tokenizer.json").write_text("{}")
    fast = model_digests(str(folder))
    (folder / "vocab.json").unlink()
    assert model_digests(str(folder)) == fast


def test_a_moved_model_stays_the_same_and_a_file_that_was_not_changed_is_read_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = model_digests(str(folder))
    monkeypatch.setattr("hashlib.file_digest", None)
    assert model_digests(str(folder)) == before
    monkeypatch.undo()
    os.utime(folder / "a.safetensors", ns=(1, 1))
    assert model_digests(str(folder)) == before
    moved = folder.rename(folder.with_name("moved"))
    assert model_digests(str(moved)) == before


def test_a_model_of_the_hub_has_its_commit_and_the_digests_of_its_cached_files(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, commit = tmp_path_factory.mktemp("cache"), "0123456789012345678901234567890123456789"
    kept = cache / "models--some--model"
    (kept / "snapshots").mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    expected = model_digests(str(folder))
    folder.rename(kept / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    for name in ("some/model", "some/model@main", f"some/model@{commit}"):
        assert model_digests(name) == {**expected, "commit": commit}
    assert model_digests("some/other") == {}
    assert model_digests("/no/such/folder") == {}
    assert differing({}, expected) is None
    assert differing({"commit": commit}, expected) is None


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
