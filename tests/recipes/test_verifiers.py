"""verifiers environments by name, with a stand-in for the Python that has the package."""

import json
import sys
from pathlib import Path

import pytest

import viva
from viva.recipes.environment import command_of
from viva.recipes.programs import train_recipe
from viva.serve import agents

EPISODE = """
import json, os, sys, urllib.request

taskset, options = sys.argv[-2:]
assert (taskset, json.loads(options)) == ("sums", {"level": 2}), sys.argv
number = json.loads(sys.stdin.readline())["question"]
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": f"Task {number}"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
with urllib.request.urlopen(request) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
with open("asked.txt", "a") as file:
    file.write(number + "\\n")
print(len(said))
"""


def stand_in(folder: Path, version: str) -> str:
    """A program that says that it has a version of verifiers, and plays episodes by a script of its own."""
    (folder / "episode.py").write_text(EPISODE)
    program = folder / "python"
    plays = f'exec {sys.executable} {folder}/episode.py "$@"'
    program.write_text(f'#!/bin/sh\nif [ "$2" = -c ]; then echo "{version}"; else {plays}; fi\n')
    program.chmod(0o755)
    return str(program)


def test_the_groups_of_a_run_play_one_task_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = json.dumps({"python": stand_in(tmp_path, "0.4.0"), "level": 2})
    command = ["environment=verifiers:sums", f"environment_options={options}", "group_size=2", "batch_size=4"]
    quick = ["max_steps=1", "max_tokens=8", "lora_rank=4", "log_path=run", "trackers=[]", "model_name=tiny"]
    assert train_recipe("environment", [*command, *quick]) == 0
    assert sorted((tmp_path / "asked.txt").read_text().split()) == ["0", "0", "1", "1"]
    assert viva.load_run("run").metrics["rollout/groups"].tolist() == [2]


@pytest.mark.parametrize(("version", "told"), [("0.1.9", "has verifiers 0.1.9"), ("", "has no verifiers")])
def test_a_python_without_this_verifiers_is_refused_with_what_to_install(
    tmp_path: Path, version: str, told: str
) -> None:
    with pytest.raises(ValueError, match=f"{told}.*pip install 'verifiers>=0.4,<0.5'.*environment_options"):
        command_of("verifiers:sums", {"python": stand_in(tmp_path, version)})
    with pytest.raises(ValueError, match="cannot be run"):
        command_of("verifiers:sums", {"python": str(tmp_path / "none")})


def test_the_script_of_an_episode_is_found_without_being_imported(tmp_path: Path) -> None:
    python, flag, script, taskset, fields = command_of(
        "verifiers:sums", {"python": stand_in(tmp_path, "0.4.0"), "n": 1}
    )
    assert Path(script).parent == Path(agents.__file__).parent
    assert (python, flag, taskset, fields) == (str(tmp_path / "python"), "-P", "sums", '{"n": 1}')
