"""A run that is killed and resumed ends like one that was never stopped; a run that is interrupted can be resumed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from killed_run import NUM_STEPS, PLACES

SCRIPT = Path(__file__).with_name("killed_run.py")


@pytest.fixture(scope="module")
def run():
    """Does one run in its own process and returns its exit code."""
    command = [sys.executable, str(SCRIPT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

        def do(folder, name="none", call=0, place="snapshot"):
            server.stdin.write(json.dumps([str(folder), name, call, place]) + "\n")
            server.stdin.flush()
            for line in server.stdout:
                if line.startswith("exit "):
                    return int(line.removeprefix("exit "))
            raise AssertionError("the server of runs died")

        yield do
        server.stdin.close()


def outcome(folder: Path):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]
    transcripts = [(folder / name).read_text() for name in ("transcripts.jsonl", "tokens.jsonl")]
    weights = (folder / "state" / "weights" / f"{NUM_STEPS:06d}" / "state.json").read_text()
    return metrics, transcripts, weights


@pytest.fixture(scope="module")
def uninterrupted(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder) == 0
    metrics, _, _ = outcome(folder)
    assert [row["step"] for row in metrics] == list(range(NUM_STEPS))
    return outcome(folder)


STRIKES = [
    *(
        (place, call)
        for place in ("snapshot", "rollouts", "backward", "update")
        for call in range(1, NUM_STEPS + 1)
    ),
    *(("log", call) for call in range(1, 2 * NUM_STEPS + 1)),  # two files per step
    *((place, call) for place in ("state", "index") for call in range(1, 5)),
]


@pytest.mark.parametrize(("place", "call"), STRIKES)
def test_a_killed_run_resumes_exactly(run, tmp_path, uninterrupted, place, call):
    assert run(tmp_path, "SIGKILL", call, place) == -9
    assert run(tmp_path) == 0
    assert outcome(tmp_path) == uninterrupted


def test_a_run_killed_again_while_it_resumes_still_resumes_exactly(run, tmp_path, uninterrupted):
    assert run(tmp_path, "SIGKILL", 4, "update") == -9
    assert run(tmp_path, "SIGKILL", 2, "update") == -9
    assert run(tmp_path, "SIGKILL", 1, "state") == -9
    assert run(tmp_path) == 0
    assert outcome(tmp_path) == uninterrupted


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(("place", "call"), [("rollouts", 4), ("backward", 4), ("state", 1)])
def test_an_interrupted_run_saves_and_resumes_exactly(run, tmp_path, uninterrupted, name, place, call):
    assert run(tmp_path, name, call, place) == 75
    rows = [json.loads(line) for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines()]
    assert rows[-1]["next_step"] == len((tmp_path / "metrics.jsonl").read_text().splitlines())
    assert run(tmp_path) == 0
    assert outcome(tmp_path) == uninterrupted


def test_the_last_three_checkpoints_and_the_final_one_are_kept(run, tmp_path):
    assert run(tmp_path) == 0
    rows = [json.loads(line) for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == ["000002", "000004", "000006", "000007"]
    assert [row["final"] for row in rows] == [False, False, False, True]
    assert sorted(path.name for path in (tmp_path / "state" / "weights").iterdir()) == [
        row["name"] for row in rows
    ]


def test_a_finished_run_stays_as_it_is(run, tmp_path, uninterrupted):
    assert run(tmp_path) == 0
    assert run(tmp_path) == 0
    assert outcome(tmp_path) == uninterrupted


def test_every_named_place_is_struck():
    assert {place for place, _ in STRIKES} == set(PLACES)
