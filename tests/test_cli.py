"""The command line: what it lists, delegates and refuses."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import viva
import viva.cli
import viva.recipes
from viva.recipes.programs import RECIPES


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        viva.cli.main(["--version"])
    assert capsys.readouterr().out == f"viva {viva.__version__}\n"


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert viva.cli.main([]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("train", "report", "recipes", "--version"))


@pytest.mark.parametrize(
    ("typed", "meant"), [("trian", "train"), ("reprot", "report"), ("recipe", "recipes")]
)
def test_an_unknown_command_names_the_one_that_was_meant(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert viva.cli.main([typed]) == 2
    error = capsys.readouterr().err
    assert f"unknown command {typed!r}" in error
    assert f"Did you mean {meant!r}?" in error


@pytest.mark.parametrize("typed", ["warmup", "critique-self-play"])
def test_a_recipe_given_as_a_command_names_the_command_that_runs_it(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert viva.cli.main([typed]) == 2
    assert f"'viva train {typed.replace('-', '_')}' runs the recipe" in capsys.readouterr().err


def test_recipes_lists_names_and_first_lines_without_running_them() -> None:
    code = (
        "import sys, viva.cli\n"
        "viva.cli.main(['recipes'])\n"
        "assert not [name for name in sys.modules if name.startswith('viva.recipes.critique')]\n"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "critique_self_play\n    Critique self-play (CoNL): propose, rank blindly" in told
    assert "    viva train critique_self_play key=value ...\n" in told
    assert [line for line in told.splitlines() if not line.startswith(" ")] == list(RECIPES)


@pytest.mark.parametrize(
    ("typed", "recipe", "more"),
    [
        ("math_efficiency", "math_efficiency", []),
        ("math-efficiency", "math_efficiency", []),
        ("own.py:TALK", "protocol", ["protocol=own.py:TALK"]),
    ],
)
def test_train_hands_a_recipe_its_options(
    monkeypatch: pytest.MonkeyPatch, typed: str, recipe: str, more: list[str]
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("viva.recipes.programs.train_recipe", lambda *given: seen.append(given) or 7)
    assert viva.cli.main(["train", typed, "a=1", "--help", "b=x y"]) == 7
    assert seen == [(recipe, [*more, "a=1", "--help", "b=x y"])]


def test_an_unknown_recipe_names_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert viva.cli.main(["train", "math_eficiency", "a=1"]) == 2
    assert "Did you mean 'math_efficiency'?" in capsys.readouterr().err


def test_report_prints_the_path_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "reward/mean": 0.5}) + "\n")
    assert viva.cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert viva.cli.main(["report", str(tmp_path), "-o", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").read_bytes() == (tmp_path / "report.html").read_bytes()


def test_report_on_a_folder_that_is_no_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert viva.cli.main(["report", str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err


def test_help_is_there_in_well_under_a_second() -> None:
    """The best of three starts, so that a busy machine does not decide."""
    seconds: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "viva", "--help"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.6


def test_protocol_check_prints_who_sees_what_and_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert viva.cli.main(["protocol", "check", "critique", "--agents", "4"]) == 0
    out = capsys.readouterr().out
    assert "round 2: review (simultaneous)" in out
    assert "agent 1 sees the problem; proposal of 0, 1, 2, 3" in out


def test_protocol_check_refuses_what_does_not_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken_talk.py"
    broken.write_text(
        "from dataclasses import replace\n"
        "from viva.selfplay.round_robin import round_robin_protocol\n"
        "good = round_robin_protocol(2)\n"
        "BAD = replace(good, min_agents=0, on_failure='x')\n"
    )
    assert viva.cli.main(["protocol", "check", f"{broken}:BAD"]) == 2
    error = capsys.readouterr().err
    assert "min_agents must be at least 1" in error
    assert "on_failure must be" in error
    assert viva.cli.main(["protocol", "check", "critique", "--agents", "1"]) == 2
    assert viva.cli.main(["protocol", "check", f"{broken}:GONE"]) == 2


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (
            ["protocol", "check", "critique"],
            {"torch", "transformers", "datasets", "tinker", "tinker_cookbook", "peft", "numpy"},
        ),
        (["cost", "recipe=math_efficiency"], {"transformers", "datasets", "peft", "numba"}),
    ],
)
def test_a_command_that_only_looks_loads_no_heavy_package(arguments: list[str], heavy: set[str]) -> None:
    code = f"import sys, viva.cli\nviva.cli.main({arguments})\n"
    code += "sys.stdout.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not heavy & set(done.stdout.splitlines()[-1].split())


def test_threads_are_set_before_a_command_loads_torch(tmp_path: Path) -> None:
    code = (
        "import os, sys; from viva.cli import main; "
        "print(main(['rescore', 'gone']), 'torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.stdout.split() == ["2", "True", "passive"]


@pytest.mark.parametrize(
    "arguments", ["recipes", "view", "--help", "train critique_self_play --help", "protocol check critique"]
)
def test_a_reader_that_goes_away_gets_no_traceback(arguments: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)  # whatever is written is refused
    command = [sys.executable, "-m", "viva.cli", *arguments.split()]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    os.close(write)
    assert done.returncode == (0 if arguments == "--help" else 141)  # argparse takes no notice
    assert done.stderr == ""


def test_view_without_a_run_lists_the_runs_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert viva.cli.main(["view"]) == 0
    assert "There are no runs in" in capsys.readouterr().out
    for number, name in enumerate(("runs/old", "here", "runs/a b", "runs/group/new")):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"step": 0}\n')
        (folder / "config.json").write_text(json.dumps({"recipe": "some", "model_name": "tiny"}))
        os.utime(folder / "metrics.jsonl", (1000 + number, 1000 + number))
    (tmp_path / "runs" / "model").mkdir()
    (tmp_path / "runs" / "model" / "config.json").write_text("{}")
    assert viva.cli.main(["view"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"viva view {name}  # some, tiny" for name in ("runs/group/new", "'runs/a b'", "here", "runs/old")
    ]
