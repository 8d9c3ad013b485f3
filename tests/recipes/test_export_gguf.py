"""A trained run as a GGUF file: its own engine and plain ``transformers`` compute of it what they do of the folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import chz
import pytest
import torch
import yaml
from gguf_files import TEMPLATE, TEXTS, small_model, write_gguf
from trained_runs import TOKENS, expected, logprobs_of, plain, trained_run
from transformers import AutoModelForCausalLM, AutoTokenizer

import viva
import viva.run.export
from viva.cli import main
from viva.engine.gguf import gguf_folder
from viva.engine.gguf_file import GgufFile
from viva.recipes.export import ExportOptions, export_run
from viva.tiny import model_path


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VIVA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=["file, tied", "file", "folder", "gemma3 file, tied"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that started from a GGUF file, or from the folder that one was unpacked into."""
    folder = tmp_path_factory.mktemp("export")
    family = {"folder": "qwen2", "gemma3 file, tied": "gemma3"}.get(request.param, "llama")
    file = write_gguf(folder / "base.gguf", small_model(family, tied="tied" in request.param))
    return trained_run(folder / "run", gguf_folder(file) if request.param == "folder" else file)


def loaded(file: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(gguf_folder(file)).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits.float()


def test_the_file_is_the_merged_folder_to_the_bit(trained: Path, tmp_path: Path) -> None:
    _, merged = export_run(trained, ExportOptions(to=str(tmp_path / "out")))
    (file,) = viva.load_run(trained).export(to=str(tmp_path / "mine.gguf"))
    assert file == tmp_path / "mine.gguf"
    assert torch.equal(logits(loaded(file)), logits(plain(merged)))
    assert logprobs_of(loaded(file)) == pytest.approx(expected(trained), abs=1e-5)
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (gguf_folder(file), merged))
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    assert ours.chat_template == theirs.chat_template == TEMPLATE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.gguf", "mine.md", "out"] + (
        ["cache"] if (tmp_path / "cache").exists() else []
    )


def test_in_16_bits_the_file_is_rounded_as_the_folder_is(trained: Path, tmp_path: Path) -> None:
    options = ExportOptions(to=str(tmp_path / "out"), precision="bfloat16")
    _, merged = export_run(trained, options)
    (file,) = export_run(trained, chz.replace(options, to=str(tmp_path / "rounded.gguf")))
    # not loaded in 16 bits first, which would round Gemma's factor of the embeddings, too
    assert torch.equal(logits(loaded(file)), logits(plain(merged, "float32")))
    half = chz.replace(options, to=str(tmp_path / "half.gguf"), precision="float16")
    (file,) = export_run(trained, half)
    assert logprobs_of(loaded(file)) == pytest.approx(expected(trained), abs=0.01)
    assert logprobs_of(loaded(file)) != logprobs_of(plain(merged).float())


def test_the_command_writes_what_the_file_said_and_a_card(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(trained), f"to={tmp_path / 'new' / 'mine.gguf'}", "checkpoint=000003"]
    assert main([*arguments, "precision=q8_0"]) == 0
    file = tmp_path / "new" / "mine.gguf"
    assert capsys.readouterr().out == f"{file}\n"
    base = Path(json.loads((trained / "config.json").read_text())["model_name"])
    if base.is_file():
        new, old = GgufFile(file), GgufFile(base)
        assert new.typed_fields.items() >= old.typed_fields.items()
    assert GgufFile(file).fields["general.name"] == "mine"
    assert logprobs_of(loaded(file)) == pytest.approx(expected(trained, 3), abs=0.2)
    card = (tmp_path / "new" / "mine.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["library_name"] == "gguf"
    assert "3 training steps, q8_0 weights" in card
    assert "llama-cli -m ./mine.gguf" in card
    assert main(arguments) == 2
    assert "mine.gguf exists; give another file (to=FILE.gguf), or overwrite=true" in capsys.readouterr().err
    assert main([*arguments, "overwrite=true"]) == 0
    assert logprobs_of(loaded(file)) == pytest.approx(expected(trained, 3), abs=1e-5)
    assert "3 training steps, float32 weights" in (tmp_path / "new" / "mine.md").read_text()


def test_a_model_of_which_all_was_trained_is_written_whole_and_stays_tied(tmp_path: Path) -> None:
    base = write_gguf(tmp_path / "base.gguf", small_model(tied=True))
    run = trained_run(tmp_path / "run", base, rank=0)
    (file,) = export_run(run, ExportOptions(to=str(tmp_path / "mine.GGUF")))
    assert logprobs_of(loaded(file)) == pytest.approx(expected(run), abs=1e-5)
    assert "output.weight" not in GgufFile(file).tensors
    (half,) = export_run(run, ExportOptions(to=str(tmp_path / "half.gguf"), precision="float16"))
    assert half.stat().st_size < file.stat().st_size


def no_work(*_args: Any, **_options: Any) -> None:
    raise AssertionError("weights were merged")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "mine.gguf", "merge": False}, r"mine\.gguf holds the merged model.*leave merge=false out"),
        (
            {"to": "folder", "precision": "float16"},
            r"precision=float16 is that of a GGUF file \(to=FILE\.gguf\)",
        ),
        ({"precision": "q8_0"}, r"in a folder is float32 or bfloat16"),
        ({"to": "there.gguf"}, r"there\.gguf is a folder; give the path of a file"),
        ({"to": "noted.gguf"}, r"noted\.md exists; give another file"),
        ({"to": "../base.gguf", "overwrite": True}, r"base\.gguf would replace the base model"),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    base = write_gguf(tmp_path / "base.gguf", small_model())
    run = trained_run(tmp_path / "run", base)
    place = tmp_path / "place"
    (place / "there.gguf").mkdir(parents=True)
    (place / "noted.md").write_text("mine")
    monkeypatch.chdir(place)
    monkeypatch.setattr("viva.run.export.merged_model", no_work)
    monkeypatch.setattr("viva.run.export.merged_model", no_work)
    before = base.read_bytes()
    with pytest.raises(ValueError, match=message):
        export_run(run, ExportOptions(**options))
    assert sorted(path.name for path in place.iterdir()) == ["noted.md", "there.gguf"]
    assert base.read_bytes() == before


def test_a_model_that_llama_cpp_does_not_know_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained_run(tmp_path / "run", model_path())
    monkeypatch.setattr("viva.run.export.merged_model", no_work)
    with pytest.raises(ValueError, match=r"cuts text by .* none of gpt-2.*to=FOLDER.*convert_hf_to_gguf\.py"):
        export_run(run, ExportOptions(to=str(tmp_path / "new" / "mine.gguf")))
    assert not (tmp_path / "new").exists()


def test_a_base_model_that_is_damaged_is_told_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = gguf_folder(write_gguf(tmp_path / "base.gguf", small_model()))
    run = trained_run(tmp_path / "run", shutil.copytree(base, tmp_path / "base"))
    (tmp_path / "base" / "tokenizer.json").write_text("{")
    monkeypatch.setattr("viva.run.export.merged_model", no_work)
    with pytest.raises(ValueError, match=r"the model '.*base' cannot be loaded"):
        export_run(run, ExportOptions(to=str(tmp_path / "mine.gguf")))


def test_an_export_that_fails_leaves_what_was_there(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ExportOptions(to=str(tmp_path / "mine.gguf"), overwrite=True)
    export_run(trained, options)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    real = viva.run.export.write_gguf

    def torn(file: Path, *rest: Any) -> None:
        real(file, *rest)
        file.write_bytes(file.read_bytes()[:1000])
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr("viva.run.export.write_gguf", torn)
    with pytest.raises(OSError, match="No space left"):
        export_run(trained, options)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
