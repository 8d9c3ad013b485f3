"""What a model's folder may not ask for; the audit is in ``tests/reliability/test_files_code.py``."""

import json
from pathlib import Path

import pytest

from viva.engine.model_folder import check_model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"")
    return tmp_path


def index(folder: Path, content: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


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
    with pytest.raises(ValueError, match=r"config\.json' is damaged"):
        check_model_folder(folder)
