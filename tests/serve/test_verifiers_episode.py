"""An episode of verifiers, played by the script that a Python of its own runs: on stand-ins for two versions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import verifiers_stand_ins
from chat_server import chat_server, completion, in_turn

import viva
from viva.recipes.programs import train_recipe
from viva.serve import agents

SCRIPT = Path(agents.__file__).with_name("verifiers_episode.py")


def episode(
    folder: Path, version: str, environment: str, number: int = 0, **options: object
) -> tuple[subprocess.CompletedProcess[str], list[list[tuple[str, str]]]]:
    """An episode whose policy says ``one``, then ``three``: the process, and what the policy was asked."""
    with chat_server(in_turn(completion("one"), completion("three"))) as server:
        variables = {
            "PYTHONPATH": verifiers_stand_ins.install(folder, version),
            "OPENAI_BASE_URL": server.url,
            "OPENAI_API_KEY": "k",
        }
        played = subprocess.run(
            [sys.executable, "-P", str(SCRIPT), environment, json.dumps(options)],
            input=json.dumps({"question": str(number)}),
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert set(server.keys) <= {"Bearer k"}
        asked = [[(said["role"], said["content"]) for said in each["messages"]] for each in server.requests]
    return played, asked


@pytest.mark.parametrize(("number", "task"), [(0, "a"), (3, "b")])
def test_an_environment_of_load_environment_is_played_to_its_reward_and_tasks_begin_anew(
    tmp_path: Path, number: int, task: str
) -> None:
    played, asked = episode(tmp_path, "0.3.1", "capitals", number)
    assert played.stdout == "2.5\n", played.stderr
    first = [("user", task)]
    assert asked == [first, [*first, ("assistant", "one"), ("user", "again")]]


@pytest.mark.parametrize(("number", "task"), [(1, "b"), (5, "c")])
def test_a_taskset_that_answers_hears_the_whole_conversation_and_its_agents_rewards_are_averaged(
    tmp_path: Path, number: int, task: str
) -> None:
    played, asked = episode(tmp_path, "0.4.0", "guessing", number)
    assert played.stdout == "3.0\n", played.stderr
    said = [("system", "Be brief."), ("user", task), ("assistant", "one"), ("user", "Higher.")]
    assert asked == [said[:2], said, [*said, ("assistant", "three"), ("user", "Lower.")]]


def test_tasks_without_an_end_are_counted_from_the_first(tmp_path: Path) -> None:
    assert episode(tmp_path, "0.4.0", "guessing", 2, endless=True)[1][0][1] == ("user", "c")


@pytest.mark.parametrize(
    ("version", "environment", "reason"),
    [("0.3.1", "capitals", "ran out of paper"), ("0.4.0", "guessing", "TaskError: no paper")],
)
def test_a_failed_episode_has_its_reason_and_no_reward(
    tmp_path: Path, version: str, environment: str, reason: str
) -> None:
    played, _ = episode(tmp_path, version, environment, fails=True)
    assert played.returncode != 0
    assert played.stdout == ""
    assert reason in played.stderr


def test_all_turns_of_such_an_episode_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", verifiers_stand_ins.install(tmp_path / "lib", "0.4.0"))
    quick = ["max_steps=1", "max_tokens=8", "lora_rank=4", "log_path=run", "trackers=[]", "model_name=tiny"]
    sizes = ["group_size=2", "batch_size=2", "tokens_every=1", "temperature=2"]
    assert train_recipe("environment", ["environment=verifiers:guessing", *sizes, *quick]) == 0
    (row,) = [json.loads(line) for line in Path("run/tokens.jsonl").read_text().splitlines()]
    assert [(turn["seat"], turn["turn"]) for turn in row["turns"]] == [
        (s, t) for s in (0, 1) for t in range(3)
    ]
    for turn in row["turns"]:
        assert set(turn["mask"]) == {1}
    assert viva.load_run("run").metrics["num_turns"].tolist() == [3.0]
