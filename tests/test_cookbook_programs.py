"""``viva cookbook``: programs of tinker-cookbook as they are, killed and run again."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked_commands import start
from random_models import make_model

import viva.cli
from viva.engine.checkpoint import read_tensors

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
NUM_STEPS = 30
OPTIONS = [
    f"model_name={MODEL}",
    "log_path=run",
    "batch_size=2",
    "lora_rank=2",
    "save_every=2",
    f"max_steps={NUM_STEPS}",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a model and two data sets under their hub names."""
    folder = tmp_path_factory.mktemp("cookbook")
    make_model(folder / MODEL, "qwen3", names_labels=False)
    gsm8k, no_robots = folder / "openai" / "gsm8k", folder / "HuggingFaceH4" / "no_robots"
    for data in (gsm8k, no_robots):
        data.mkdir(parents=True)
    (gsm8k / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
    )
    # the only package of the extra math-rl that Viva does not bring; the loop imports it, and grades without it
    (folder / "pylatexenc").mkdir()
    (folder / "pylatexenc" / "__init__.py").write_text("latex2text = None\n")
    numbers = range(2 * NUM_STEPS)
    problems = [{"question": f"{n} + 1?", "answer": f"It is #### {n + 1}"} for n in numbers]
    talks = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"Yes, {n}."}]}
        for n in numbers
    ]
    for data, rows in ((gsm8k, problems), (no_robots, talks)):
        (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Program:
    """A program of the cookbook in a process of its own."""

    def __init__(self, place: Path, name: str, runs: Path, *more: str) -> None:
        options = [option.replace("log_path=run", f"log_path={runs / 'run'}") for option in OPTIONS]
        self.log = runs / "run" / "checkpoints.jsonl"
        self.told = runs / "told.txt"
        command = ["cookbook", "--states", str(runs / "states"), name, *options, *more]
        self.process = start(command, place, self.told)

    def saved(self) -> list[dict[str, Any]]:
        """What the program's log of checkpoints holds; a line that is being written does not count."""
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def kill_after_a_checkpoint(self) -> None:
        """Send SIGKILL once there is one, and the program has not ended."""
        while not self.saved():
            assert self.process.is_alive(), self.told.read_text()
            time.sleep(0.005)
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL

    def ends(self) -> dict[str, Any]:
        """Its last checkpoint, after it has ended."""
        self.process.join()
        assert self.process.exitcode == 0, self.told.read_text()
        return self.saved()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"), [("rl_loop", ["group_size=2", "max_tokens=4"]), ("sl_loop", ["max_length=64"])]
)
def test_a_loop_that_was_killed_goes_on_by_the_same_command(
    place: Path, tmp_path: Path, name: str, more: list[str]
) -> None:
    killed = tmp_path / "killed"
    killed.mkdir()
    Program(place, name, killed, *more).kill_after_a_checkpoint()
    again = Program(place, name, killed, *more)
    final = again.ends()
    assert final["name"] == "final"
    names = [checkpoint["name"] for checkpoint in again.saved()]
    assert len(set(names)) < len(names), "the second process saved under a name of the first"
    paths = [checkpoint["state_path"] for checkpoint in again.saved()]
    assert len(set(paths)) == len(paths)
    if name == "sl_loop":
        whole = tmp_path / "whole"
        whole.mkdir()
        expected = Program(place, name, whole, *more).ends()
        ours, theirs = (
            read_tensors(Path(found["sampler_path"]) / "adapter_model.safetensors")
            for found in (final, expected)
        )
        assert ours.keys() == theirs.keys()
        assert all((ours[key] == theirs[key]).all() for key in ours)


def test_unknown_programs_are_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert viva.cli.main(["cookbook", "rl_lop"]) == 2
    told = capsys.readouterr().err
    assert "unknown program 'rl_lop'; allowed: " in told
    assert "Did you mean 'rl_loop'?" in told
    assert "math_rl.train" in told


def test_a_file_of_ones_own_runs_on_the_local_engine_and_a_missing_package_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["viva"])
    program = tmp_path / "own.py"
    program.write_text("import sys, tinker\nprint(type(tinker.ServiceClient()).__name__, sys.argv[1:])\n")
    assert viva.cli.main(["cookbook", "--device", "cpu", str(program), "a=1"]) == 0
    assert capsys.readouterr().out == "InstalledServiceClient ['a=1']\n"
    program.write_text("import no_such_package_of_anybody\n")
    assert viva.cli.main(["cookbook", "--device", "cpu", str(program)]) == 2
    assert (
        "needs a package that is not there: No module named 'no_such_package_of_anybody'"
        in capsys.readouterr().err
    )
    assert viva.cli.main(["cookbook", "--precision", "int8", str(program)]) == 2
    assert "int8" in capsys.readouterr().err
