"""A run is bound to its base model, states, options, prompts and code: whatever was exchanged is refused by name."""

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from random_models import make_model
from safetensors.torch import load_file, save_file

import viva.cli
from viva.model_files import SEAL, model_digests, sealed
from viva.recipes import common
from viva.recipes.programs import train_recipe
from viva.run.log import RunLog
from viva.training.service import EngineConfig

math_main = partial(train_recipe, "math_efficiency")

main = partial(train_recipe, "conversation_preference_rl")

OPTIONS = {
    "num_agents": 2,
    "max_rounds": 1,
    "batch_size": 2,
    "max_tokens": 4,
    "lora_rank": 4,
    "learning_rate": 1e-3,
    "judge_max_off_set_mass": 1.0,
    "tournament_pattern": "all_pairs_one_way",
    "eval_every": 0,
    "num_test_conversations": 0,
    "save_every": 1,
    "max_steps": 2,
}


def other_of_equal_shapes(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.fixture
def start(model, problems):
    """Begins or resumes a run; its exit code."""

    def begin(log_path, **options):
        given = {"model_name": model, "train_prompts_path": problems, "log_path": log_path}
        return main([f"{name}={value}" for name, value in (OPTIONS | given | options).items()])

    return begin


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    path.write_text("".join(f'{{"query": "What is {n} + 1?", "answer": {n + 1}}}\n' for n in range(5)))
    return path


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "base", "qwen3")


@pytest.fixture
def run(start, tmp_path):
    """A complete run of two steps."""
    assert start(tmp_path / "run") == 0
    return tmp_path / "run"


def replaced(model: Path) -> None:
    other = other_of_equal_shapes(model, model.with_name("new"))
    shutil.rmtree(model)
    other.rename(model)


def contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def refuses(capsys):
    """Checks that a command is refused and changes nothing in a folder; what it says."""

    def check(command, folder: Path) -> str:
        before = contents(folder)
        capsys.readouterr()
        assert command() == 2
        assert contents(folder) == before
        return capsys.readouterr().err

    return check


def test_a_base_that_was_replaced_at_its_path_is_not_trained_on(run, model, start, refuses):
    replaced(model)
    told = refuses(lambda: start(run, max_steps=3, behavior_if_exists="resume"), run)
    assert f"belongs to another base model than '{model}', which differs in its weights (SHA-256" in told
    assert "put that model's files back" in told


def test_nor_where_the_run_has_no_checkpoint_yet(model, start, refuses, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("viva.recipes.loop.train", lambda training: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            start(tmp_path / "run")
    replaced(model)
    told = refuses(lambda: start(tmp_path / "run", behavior_if_exists="resume"), tmp_path / "run")
    assert f"the run in {tmp_path / 'run'} belongs to another base model" in told


def test_a_run_does_not_end_before_where_it_is(run, start, refuses):
    told = refuses(lambda: start(run, max_steps=1, behavior_if_exists="resume"), run)
    assert f"the run in {run} has made 2 steps, and is to end after 1; give as many steps" in told
    assert start(run, max_steps=2, behavior_if_exists="resume") == 0


def test_a_run_that_ended_in_a_part_of_a_batch_is_not_made_longer(start, refuses, tmp_path):
    """Batches are counted from the beginning: the rest of that one would never be played."""
    start = partial(start, tmp_path / "run", batch_size=4, max_steps=9)
    assert start(num_epochs=1) == 0  # five prompts, two a step
    resumed = partial(start, behavior_if_exists="resume")
    told = refuses(lambda: resumed(num_epochs=2), tmp_path / "run")
    assert f"the last step of the run in {tmp_path / 'run'} had 1 of 2 prompts" in told
    assert resumed(num_epochs=1) == 0


def test_a_run_that_ended_in_a_part_of_its_only_batch_is_not_made_longer(start, refuses, tmp_path):
    start = partial(start, tmp_path / "run", batch_size=8)
    assert start(max_training_datapoints=6) == 0  # three prompts of four
    told = refuses(lambda: start(max_training_datapoints=8, behavior_if_exists="resume"), tmp_path / "run")
    assert "in the longer run it would have 4" in told


def test_a_run_of_whole_batches_is_made_longer_in_passes(start, tmp_path):
    start = partial(start, tmp_path / "run", batch_size=4, max_steps=9, num_epochs=2)
    assert start(max_steps=5) == 0
    assert start(num_epochs=4, behavior_if_exists="resume", max_steps=6) == 0


def test_a_run_on_the_built_in_policy_goes_on_after_the_package_moved(model, start, tmp_path, monkeypatch):
    monkeypatch.setattr("viva.recipes.common.model_path", lambda: model)
    assert start(tmp_path / "run", model_name="tiny") == 0
    moved = model.rename(tmp_path / "moved")
    monkeypatch.setattr("viva.recipes.common.model_path", lambda: moved)
    assert start(tmp_path / "run", model_name="tiny", max_steps=3, behavior_if_exists="resume") == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_weights_to_start_from_must_be_of_the_base_and_the_rank_that_the_options_name(
    run, model, start, refuses, tmp_path
):
    weights = run / "state" / "weights" / "000002"
    other = other_of_equal_shapes(model, tmp_path / "other")
    new = tmp_path / "new-run"
    told = refuses(lambda: start(new, load_checkpoint_path=weights, model_name=other), tmp_path)
    assert f"belongs to another base model than '{other}', which differs in its weights" in told
    assert f"which was '{model}'" in told
    told = refuses(lambda: start(new, load_checkpoint_path=weights, lora_rank=8), tmp_path)
    assert f"{weights} has an adapter of rank 4, and lora_rank is 8; give lora_rank=4" in told
    assert not new.exists()
    assert start(new, load_checkpoint_path=weights) == 0


def saved_elsewhere(**info):
    """A remote engine that knows one saved state."""
    future = SimpleNamespace(result=lambda: SimpleNamespace(**info))
    rest = SimpleNamespace(get_weights_info_by_tinker_path=lambda path: future)
    return SimpleNamespace(create_rest_client=lambda: rest)


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ({"base_model": "a/other", "is_lora": True, "lora_rank": 4}, "a/other, and model_name is a/b; give"),
        (
            {"base_model": "a/b", "is_lora": True, "lora_rank": 8},
            "rank 8, and lora_rank is 4; give lora_rank=8",
        ),
        ({"base_model": "a/b", "is_lora": False, "lora_rank": None}, r"all weights of a model \(rank 0\)"),
    ],
)
async def test_weights_on_a_server_are_compared_by_name_and_rank(info, told):
    options = SimpleNamespace(engine=EngineConfig(engine="remote"), model="a/b", lora_rank=4)
    with pytest.raises(ValueError, match=told):
        await common._check_start("tinker://x", options, saved_elsewhere(**info))
    for rank in (4, None):
        service = saved_elsewhere(base_model="a/b", is_lora=True, lora_rank=rank)
        await common._check_start("tinker://x", options, service)


def test_run_adapter_and_card_tell_the_base_by_its_content(run, model):
    digests = model_digests(str(model))
    assert set(digests) == {"weights", "config", "tokenizer"}
    assert json.loads((run / "config.json").read_text())["base_digests"] == digests
    assert json.loads((run / "adapter" / "base_model.json").read_text()) == digests
    assert viva.cli.main(["export", str(run)]) == 0
    assert json.loads((run / "export" / "adapter" / "base_model.json").read_text()) == digests
    for name in ("adapter", "model"):
        card = (run / "export" / name / "README.md").read_text()
        assert f"SHA-256 of the base model's files: weights `{digests['weights']}`, config `" in card


@pytest.mark.parametrize("merge", ["true", "false"])
def test_weights_are_not_exported_with_another_base(run, model, refuses, tmp_path, merge):
    other = other_of_equal_shapes(model, tmp_path / "other")
    asked = ["export", str(run), f"to={tmp_path / 'to'}", f"merge={merge}"]
    told = refuses(lambda: viva.cli.main([*asked, f"model_name={other}"]), tmp_path)
    assert f"belongs to another base model than '{other}'" in told
    moved = model.rename(tmp_path / "moved")
    assert viva.cli.main([*asked, f"model_name={moved}"]) == 0


def test_run_and_adapter_are_not_evaluated_on_another_base(run, model, refuses, problems, tmp_path):
    other = other_of_equal_shapes(model, tmp_path / "other")
    for name, more in ((run, []), (run, ["checkpoint=base"]), (run / "adapter", [])):
        asked = ["eval", str(name), f"test_prompts_path={problems}", f"model_name={other}", *more]
        told = refuses(lambda asked=asked: viva.cli.main(asked), tmp_path)
        assert f"belongs to another base model than '{other}'" in told
    shutil.copytree(run / "adapter", tmp_path / "adapter")
    replaced(model)
    asked = ["eval", str(tmp_path / "adapter"), f"test_prompts_path={problems}"]
    assert "which differs in its weights" in refuses(lambda: viva.cli.main(asked), tmp_path)


def state_of(run: Path, step: int) -> Path:
    return run / "state" / "weights" / f"{step:06d}"


@pytest.fixture
def resumes(start):
    """Asks for a third step of a run."""
    return lambda run, **options: start(run, max_steps=3, behavior_if_exists="resume", **options)


def test_states_that_were_swapped_are_refused(run, resumes, refuses):
    state_of(run, 1).rename(run / "aside")
    state_of(run, 2).rename(state_of(run, 1))
    (run / "aside").rename(state_of(run, 2))
    told = refuses(lambda: resumes(run), run)
    assert f"the state in {state_of(run, 2)} is not the one that was saved after 2 steps" in told
    assert "it is undamaged, but that of the checkpoint 000001" in told
    assert "put the right state back, or give another log_path" in told


def test_a_state_of_another_run_is_refused(run, start, resumes, refuses, tmp_path):
    assert start(tmp_path / "other", seed=1) == 0
    shutil.rmtree(state_of(run, 2))
    shutil.copytree(state_of(tmp_path / "other", 2), state_of(run, 2))
    told = refuses(lambda: resumes(run), run)
    assert "it is undamaged, but none that this run saved there" in told


def test_a_damaged_state_is_still_passed_over(run, resumes, capsys):
    manifest = state_of(run, 2) / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace('"num_steps"', '"num_stops"'))
    assert resumes(run) == 0
    told = capsys.readouterr().out
    assert "note: a checkpoint cannot be read and is passed over" in told
    assert f"resuming {run} after 1 step" in told


def test_a_run_without_its_options_is_refused(run, resumes, refuses):
    (run / "config.json").unlink()
    told = refuses(lambda: resumes(run), run)
    assert "config.json is missing, so that nothing says which options the run had" in told
    assert (
        "back from a copy, give another log_path, or give the run up with behavior_if_exists=delete" in told
    )


def test_a_run_without_its_index_is_refused_and_its_states_stay(run, resumes, refuses):
    (run / "checkpoints.jsonl").rename(run / "state" / "aside")
    told = refuses(lambda: resumes(run), run)
    assert "checkpoints.jsonl is missing, but states are saved (000001, 000002)" in told
    assert "Nothing was touched. Put checkpoints.jsonl back from a copy" in told
    shutil.rmtree(run / "state" / "weights")  # as where a server has them
    assert "checkpoints.jsonl is missing, but steps are logged" in refuses(lambda: resumes(run), run)


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_anew(
    start, resumes, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr("viva.run.checkpoints.Checkpoints.save", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            start(tmp_path / "run")
    state_of(tmp_path / "run", 1).mkdir(parents=True)  # saved, but not yet in the index
    assert resumes(tmp_path / "run") == 0


def test_a_folder_that_is_no_state_of_the_run_is_not_deleted(run, resumes):
    kept = shutil.copytree(state_of(run, 1), run / "state" / "weights" / "my-favourite")
    assert resumes(run) == 0
    assert (kept / "checkpoint.json").is_file()


def test_a_run_of_an_older_version_goes_on_and_what_cannot_be_checked_is_said(run, resumes, capsys):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(without(config, "base_digests", SEAL)))
    rows = [json.loads(line) for line in (run / "checkpoints.jsonl").read_text().splitlines()]
    lines = [json.dumps(without(row, "state_digest", SEAL)) for row in rows]
    (run / "checkpoints.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for step in (1, 2):
        manifest = state_of(run, step) / "checkpoint.json"
        content = without(json.loads(manifest.read_text()), "base_digests")
        manifest.write_text(json.dumps(sealed(content)))
    assert resumes(run) == 0
    assert "note: the checkpoint 000002 has no digest of its state" in capsys.readouterr().out


def without(content, *names):
    return {name: value for name, value in content.items() if name not in names}


def math_options(model, problems, **more):
    alone = (
        "num_agents",
        "max_rounds",
        "judge_max_off_set_mass",
        "tournament_pattern",
        "num_test_conversations",
    )
    given = {"model_name": model, "train_prompts_path": problems, "hf_answer_column": "answer"}
    return without(OPTIONS, *alone) | given | {"group_size": 2, "estimator": "none"} | more


STRATEGY = """
from viva.recipes.strategies import STRATEGIES

def mine(task):
    return STRATEGIES["iid"](task)
"""


@pytest.mark.parametrize("form", ["path", "module"])
def test_a_strategy_whose_code_was_changed_is_refused(model, problems, refuses, tmp_path, monkeypatch, form):
    code = tmp_path / f"strategy_of_{form}.py"
    code.write_text(STRATEGY)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"{code}:mine" if form == "path" else f"{code.stem}:mine"
    options = math_options(model, problems, strategies=name)

    def begin(**more):
        arguments = options | {"log_path": tmp_path / "run"} | more
        return math_main([f"{name}={value}" for name, value in arguments.items()])

    assert begin() == 0
    assert begin(max_steps=3, behavior_if_exists="resume") == 0
    code.write_text(STRATEGY + "# other\n")
    told = refuses(lambda: begin(max_steps=4, behavior_if_exists="resume"), tmp_path / "run")
    assert f"holds a run with other options: the source of {name} was changed" in told


@pytest.mark.parametrize(
    ("option", "more"),
    [
        ("grader", {"strategies": "iid"}),
        (
            "conversation_reward",
            {
                "strategies": "iid,conversation",
                "conversation": "round_robin",
                "num_agents": 2,
                "batch_size": 4,
            },
        ),
    ],
)
def test_a_grader_or_reward_whose_code_was_changed_is_refused_unless_the_run_is_older_than_its_digest(
    model, problems, refuses, tmp_path, option, more
):
    code = tmp_path / "own.py"
    code.write_text("def own(*given):\n    return True if len(given) == 2 else {0: 1.0, 1: 0.0}\n")
    run, name = tmp_path / "run", f"{code}:own"
    options = math_options(model, problems, **{option: name}, **more) | {"log_path": run}

    def begin(**more):
        return math_main([f"{name}={value}" for name, value in (options | more).items()])

    assert begin() == 0
    code.write_text(code.read_text() + "# other\n")
    told = refuses(lambda: begin(max_steps=3, behavior_if_exists="resume"), run)
    assert f"the source of {name} was changed" in told
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(without(config, SEAL) | {"user_code": {}}))
    assert begin(max_steps=3, behavior_if_exists="resume") == 0


def test_a_prompt_that_is_changed_while_the_run_goes_on_is_not_trained_on(
    start, resumes, model, tmp_path, capsys, monkeypatch
):
    problems = tmp_path / "problems.jsonl"
    text = "".join(f'{{"query": "What is {n} + 1?", "answer": {n + 1}}}\n' for n in range(5))
    problems.write_text(text)
    save = RunLog.write_step

    def changing(self, *step, **rows):
        save(self, *step, **rows)
        problems.write_text(text.replace("What is", "Who was"))

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write_step", changing)
        assert start(tmp_path / "run", train_prompts_path=problems) == 1
    told = capsys.readouterr().err
    assert f"{problems} was changed while the run reads from it: prompt" in told
    assert "Who was" not in (tmp_path / "run" / "transcripts.jsonl").read_text()
    assert resumes(tmp_path / "run", train_prompts_path=problems) == 2
    assert "prompts_digest was" in capsys.readouterr().err
    problems.write_text(text)
    assert resumes(tmp_path / "run", train_prompts_path=problems) == 0
