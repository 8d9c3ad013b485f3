"""What is exported loads in plain peft and plain transformers, and gives the engine's own logprobs."""

import functools
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import chz
import pytest
import torch
import yaml
from pages import codes, page, tables
from random_models import make_model
from safetensors.torch import load_file, save_file
from trained_runs import expected, logprobs_of, plain, trained_run
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import viva.run.export
from viva.cli import main
from viva.engine import LocalServiceClient
from viva.recipes.export import ExportOptions, export_run
from viva.run.files import write_json
from viva.tiny import model_path
from viva.view.model_card import ModelCard, measurements, model_card
from viva.view.run_index import read_run


def qwen_model(folder: Path) -> Path:
    return make_model(folder, "qwen3", names_labels=False)


def tied_model(folder: Path) -> Path:
    """A Llama whose output layer is its embeddings."""
    make_model(folder, "llama", names_labels=False)
    config = LlamaConfig.from_pretrained(folder)
    config.tie_word_embeddings = True
    with torch.random.fork_rng():
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run_of(tmp_path_factory) -> Callable[[Callable[[Path], Path]], tuple[Path, Path]]:
    """A trained run of a kind of model, and the model; each is made once."""

    @functools.cache
    def make(kind: Callable[[Path], Path]) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("export")
        model = kind(folder / "base-model")
        return trained_run(folder / "run", model), model

    return make


@pytest.fixture(params=[qwen_model, tied_model])
def trained_kinds(request, run_of) -> tuple[Path, Path]:
    """Of both kinds, for what depends on the weights."""
    return run_of(request.param)


@pytest.fixture
def trained(run_of) -> tuple[Path, Path]:
    """Of one kind, for what depends on files and words alone."""
    return run_of(qwen_model)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*")
def test_adapter_and_merged_model_give_the_engines_logprobs(trained_kinds, tmp_path) -> None:
    from peft import PeftModel

    run, model = trained_kinds
    adapter, merged = export_run(run, ExportOptions(to=str(tmp_path)))
    assert (adapter, merged) == (tmp_path / "adapter", tmp_path / "model")
    base = plain(model)
    moved = [abs(a - b) for a, b in zip(logprobs_of(base), expected(run), strict=True)]
    assert max(moved) > 0.1
    assert logprobs_of(PeftModel.from_pretrained(base, adapter).eval()) == pytest.approx(
        expected(run), abs=1e-5
    )
    assert logprobs_of(plain(merged)) == pytest.approx(expected(run), abs=1e-5)
    ids = [AutoTokenizer.from_pretrained(folder).encode("abc") for folder in (merged, model)]
    assert ids[0] == ids[1]


def test_an_earlier_checkpoint_and_another_precision_can_be_had(trained_kinds, tmp_path) -> None:
    run, _ = trained_kinds
    (tmp_path / "notes.txt").write_text("mine")
    options = ExportOptions(to=str(tmp_path), checkpoint="000003", precision="bfloat16")
    _, merged = export_run(run, options)
    model = plain(merged)
    assert model.dtype is torch.bfloat16
    assert logprobs_of(model) == pytest.approx(expected(run, 3), abs=0.1)
    with pytest.raises(
        ValueError, match=r"adapter exists; give another folder \(to=\.\.\.\), or overwrite=true"
    ):
        export_run(run, options)
    adapter = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({}, adapter)
    export_run(run, chz.replace(options, overwrite=True, merge=False))
    assert load_file(adapter)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_model_of_which_all_was_trained_is_exported_whole(tmp_path, capsys) -> None:
    run = trained_run(tmp_path / "run", make_model(tmp_path / "base", "llama", names_labels=False), rank=0)
    assert main(["export", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'export' / 'model'}\n"
    assert logprobs_of(plain(run / "export" / "model")) == pytest.approx(expected(run), abs=1e-5)
    assert json.loads((run / "export" / "model" / "config.json").read_text())["dtype"] == "float32"
    with pytest.raises(ValueError, match=r"all weights \(lora_rank=0\).*Leave precision out"):
        export_run(run, ExportOptions(to=str(tmp_path / "other"), precision="bfloat16"))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("000009", "unknown checkpoint '000009'; allowed: last, 000003, 000004"),
        ("best", "Use checkpoint=last"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_refused(trained, tmp_path, capsys, name, message) -> None:
    assert main(["export", str(trained[0]), f"to={tmp_path}", f"checkpoint={name}"]) == 2
    assert message in capsys.readouterr().err


def test_the_base_model_is_never_replaced(trained, tmp_path) -> None:
    run, *_ = trained
    base = shutil.copytree(json.loads((run / "config.json").read_text())["model_name"], tmp_path / "model")
    options = ExportOptions(to=str(tmp_path), model_name=str(base), overwrite=True)
    with pytest.raises(ValueError, match="would replace the base model"):
        export_run(run, options)
    assert (base / "config.json").is_file()


def test_a_checkpoint_that_a_live_run_removes_meanwhile_is_told(trained, tmp_path, monkeypatch) -> None:
    run = shutil.copytree(trained[0], tmp_path / "run")
    real = viva.run.export.shutil.copyfile

    def pruned(source, target):
        shutil.rmtree(Path(source).parent)
        return real(source, target)

    monkeypatch.setattr(viva.run.export.shutil, "copyfile", pruned)
    with pytest.raises(ValueError, match=r"checkpoint .* was removed while it was exported.*Export again"):
        export_run(run, ExportOptions())


def test_a_folder_without_a_run_and_a_server_that_is_gone_are_refused(tmp_path, monkeypatch) -> None:
    with pytest.raises(ValueError, match="run"):
        export_run(tmp_path, ExportOptions())
    (tmp_path / "config.json").write_text('{"model_name": "tiny"}')
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no checkpoint"):
        export_run(tmp_path, ExportOptions())
    row = {"name": "000001", "next_step": 1, "state_path": "tinker://a/weights/b", "log_sizes": {}}
    (tmp_path / "checkpoints.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr("viva.training.remote._FIRST_PAUSES_S", (0.0,))
    with pytest.raises(ValueError, match=r"no server answers at base_url=http://127\.0\.0\.1:1"):
        export_run(tmp_path, ExportOptions(base_url="http://127.0.0.1:1"))


def as_a_server_keeps_it(run: Path, to: Path) -> Path:
    """The run with its state on a server; the folder is what the server gives away: bfloat16, with few words."""
    (kept,) = [folder for folder in (run / "state" / "weights").iterdir() if folder.name == "000004"]
    to.mkdir()
    tensors = {
        name: tensor.bfloat16() for name, tensor in load_file(kept / "adapter_model.safetensors").items()
    }
    save_file(tensors, to / "adapter_model.safetensors")
    (to / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 32, "bias": "none"})
    )
    row = {"name": "000004", "next_step": 4, "state_path": "tinker://a/weights/000004", "log_sizes": {}}
    (run / "checkpoints.jsonl").write_text(json.dumps(row) + "\n")
    return to


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*")
def test_an_adapter_in_bfloat16_from_a_server_is_exported(trained_kinds, tmp_path, monkeypatch) -> None:
    from peft import PeftModel

    run = shutil.copytree(trained_kinds[0], tmp_path / "run")
    given = as_a_server_keeps_it(run, tmp_path / "given")
    base = plain(trained_kinds[1]).bfloat16()
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(trained_kinds[1]).save_pretrained(tmp_path / "base")

    async def fetch(service, state_path, folder, *, base_url):
        return shutil.copytree(given, folder)

    monkeypatch.setattr("viva.run.export.fetch_adapter", fetch)
    monkeypatch.setattr(
        "viva.training.service.make_service", lambda engine, *, state_dir: LocalServiceClient()
    )
    options = ExportOptions(to=str(tmp_path / "out"), model_name=str(tmp_path / "base"))
    adapter, merged = export_run(run, options)
    assert {tensor.dtype for tensor in load_file(adapter / "adapter_model.safetensors").values()} == {
        torch.float32
    }
    assert logprobs_of(plain(merged)) == pytest.approx(expected(run), abs=0.1)
    adapted = PeftModel.from_pretrained(plain(tmp_path / "base").float(), adapter).eval()
    assert logprobs_of(adapted) == pytest.approx(expected(run), abs=0.1)
    _, rounded = export_run(run, chz.replace(options, to=str(tmp_path / "rounded"), precision="bfloat16"))
    assert plain(rounded).dtype is torch.bfloat16


EXPORTS_THAT_ARE_KILLED = """
import importlib, json, os, signal, sys
import torch, transformers.models.llama.modeling_llama, transformers.models.qwen3.modeling_qwen3
import viva.run.export
from viva.recipes.export import ExportOptions, export_run
torch.set_num_threads(1)
def killed_at_call(number, real):
    calls = []
    def killed(*args, **options):
        calls.append(args)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    return killed
for line in sys.stdin:
    run, to, module, name, number = json.loads(line)
    child = os.fork()
    if not child:
        try:
            owner = importlib.import_module(module)
            setattr(owner, name, killed_at_call(number, getattr(owner, name)))
            export_run(run, ExportOptions(to=to, checkpoint="last", overwrite=True))
        finally:
            os._exit(1)
    sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\\n")
    sys.stdout.flush()
"""


@pytest.fixture(scope="module")
def killed_export():
    """Exports a run in a process that is killed at a call of a function; the process's exit code."""
    command = [sys.executable, "-c", EXPORTS_THAT_ARE_KILLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

        def export(run: Path, to: Path, module: str, name: str, number: int) -> int:
            server.stdin.write(json.dumps([str(run), str(to), module, name, number]) + "\n")
            server.stdin.flush()
            return int(server.stdout.readline())

        yield export


@pytest.mark.slow
@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(
    "when",
    [
        ("viva.run.export", "spell_rotary_twice", 1),
        ("shutil", "copyfile", 1),
        ("shutil", "copyfile", 2),
    ],
)
def test_an_export_that_is_killed_leaves_the_old_one_or_none(
    trained, killed_export, tmp_path, is_there, when
) -> None:
    run, _ = trained
    to = tmp_path / "out"
    before: list[float] = []
    if is_there:
        _, merged = export_run(run, ExportOptions(to=str(to), checkpoint="000003"))
        before = logprobs_of(plain(merged))
    assert killed_export(run, to, *when) == -signal.SIGKILL
    shown = {path.name for path in to.iterdir() if not path.name.startswith(".")}
    assert shown == ({"adapter", "model"} if is_there else set())
    if is_there:
        assert logprobs_of(plain(to / "model")) == before
    _, merged = export_run(run, ExportOptions(to=str(to), checkpoint="last", overwrite=is_there))
    assert logprobs_of(plain(merged)) == pytest.approx(expected(run), abs=1e-5)
    assert {path.name for path in to.iterdir()} == {"adapter", "model"}


def header(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def test_the_card_tells_configuration_and_results_and_no_private_path(trained, tmp_path) -> None:
    run, _ = trained
    adapter, merged = export_run(run, ExportOptions(to=str(tmp_path)))
    texts = [(path / "README.md").read_text() for path in (adapter, merged)]
    assert [header(text)["library_name"] for text in texts] == ["peft", "transformers"]
    for text in texts:
        assert "base_model" not in header(text)  # it is a folder, no name on the hub
        (result,) = header(text)["model-index"][0]["results"]
        assert result["metrics"][0]["value"] == pytest.approx(0.4)
        assert "| right answers, asked directly | 0.000 ± 0.098 | 0.400 ± 0.098 | 4 |" in text
        assert "4 training steps" in text
        assert "secret-folder" not in text
        assert str(run) not in text
        (block,) = re.findall(r"````json\n(.*)\n````", text, re.S)
        assert json.loads(block) == {
            "recipe": "critique_self_play",
            "model_name": "base-model",
            "log_path": "run",
            "train_prompts": "2 prompts",
            "test_prompts_path": "test.jsonl",
            "lora_rank": 4,
        }


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*")
def test_the_cards_snippet_for_the_built_in_policy_runs(tmp_path, monkeypatch) -> None:
    run = tmp_path / "run"
    trained_run(run, model_path())
    config = json.loads((run / "config.json").read_text())
    write_json(
        run / "config.json", {**{k: v for k, v in config.items() if k != "sha256"}, "model_name": "tiny"}
    )
    folders = export_run(run, ExportOptions(to=str(tmp_path / "out")))
    assert len(folders) == 2
    for folder in folders:
        card = (folder / "README.md").read_text()
        (snippet,) = re.findall(r"## Use\n\n```python\n(.*?)```", card, re.S)
        monkeypatch.chdir(folder)
        names: dict = {}
        exec(snippet, names)
        assert names["model"].num_parameters() > 1000


def test_the_card_of_damaged_metrics_gives_no_figures(trained, tmp_path) -> None:
    run = shutil.copytree(trained[0], tmp_path / "run")
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace("0.2", "0.9"))
    card = (
        export_run(run, ExportOptions(to=str(tmp_path / "out"), merge=False))[0] / "README.md"
    ).read_text()
    assert "No figures: metrics.jsonl is damaged or was changed" in card
    assert "model-index" not in card


def test_with_a_stop_rule_damaged_metrics_choose_no_checkpoint(trained, tmp_path) -> None:
    run = shutil.copytree(trained[0], tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    write_json(run / "config.json", config | {"stop_at": {"reward_truth_gap": 0.9}})
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace("0.2", "0.9"))
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged or was changed"):
        export_run(run, ExportOptions(to=str(tmp_path / "out")))
    assert export_run(run, ExportOptions(to=str(tmp_path / "out"), checkpoint="last", merge=False))


def test_the_results_are_those_of_the_checkpoint_not_later_ones(trained) -> None:
    accuracy = measurements(read_run(trained[0]), 3)["test/direct_accuracy"]
    assert (accuracy.last_step, accuracy.after) == (2, pytest.approx(0.2))


def test_what_was_first_measured_after_steps_is_not_told_as_before_the_training(tmp_path) -> None:
    rows = [{"step": step, "test/direct_accuracy": 0.1 * step} for step in (2, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(tmp_path)
    text = model_card(ModelCard(run=run, num_steps=4, kind="model", base_model="tiny", precision="float32"))
    assert "| right answers, asked directly |  | 0.400 | 4 |" in text


def test_every_option_is_documented_with_its_default() -> None:
    (table,) = tables(page("export.md"), "option")
    assert {codes(row[0])[0]: codes(row[1])[0] for row in table} == {
        name: str(value) for name, value in chz.asdict(ExportOptions()).items()
    }
