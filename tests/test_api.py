"""The public face: a protocol of one's own is trained, looked at and measured from Python."""

import asyncio
import json
import re
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import viva
import viva.cli
from viva import Protocol, Round, Segment
from viva.recipes.config import RecipeConfig, read_options
from viva.recipes.programs import train_recipe

ROOT = Path(__file__).parents[1]
ROWS = [
    {
        "query": f"Tom has {n} apples and buys {n + 2} more. How many apples does Tom have?",
        "answer": 2 * n + 2,
    }
    for n in range(2, 6)
]
QUICK: dict[str, Any] = {
    "num_agents": 2,
    "batch_size": 4,
    "max_tokens": 24,
    "lora_rank": 4,
    "learning_rate": 1e-3,
    "tokens_every": 1,
    "num_test_conversations": 0,
    "eval_every": 0,
    "trackers": [],
}


def talk(**options: Any) -> Protocol:
    rounds = [
        Round("argue", "Make your point.", ["argue"], "sequential"),
        Round("final", "Conclude.", ["argue"]),
    ]
    return Protocol(rounds=rounds, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> viva.Run:
    path = tmp_path_factory.mktemp("api") / "run"
    debate = talk(reward=viva.rewards.tournament(max_off_set_mass=1.0))
    return viva.train(debate, prompts=ROWS, test=ROWS[:2], steps=2, log_path=str(path), **QUICK)


def test_a_protocol_is_trained_from_python(finished: viva.Run) -> None:
    assert list(finished.metrics.index) == [0, 1]
    assert finished.metrics["optim/datums"].notna().all()
    assert {"adapter", "report.html", "metrics.jsonl", "transcripts.jsonl"} <= {
        path.name for path in finished.path.iterdir()
    }
    assert finished.config["recipe"] == "protocol"
    assert len(finished.conversations) == 4
    assert viva.load_run(finished.path).config == finished.config


def test_a_run_is_read_from_wherever_the_process_goes(
    finished: viva.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.path.parent)
    run = viva.load_run("run")
    monkeypatch.chdir(tmp_path)
    assert len(run.metrics) == 2
    assert len(run.conversations) == 4


def test_a_grader_that_fails_is_one_sentence_in_training_and_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def fails(reply, known):\n    return open('nowhere')\n", encoding="utf-8")
    asked = [{"query": "What is 3 + 4?", "answer": 7}]
    told = "FileNotFoundError: .*, in the grader 'own.py:fails', own.py line 2"
    options = QUICK | {"eval_every": 1, "reward": lambda talk: {0: 1.0, 1: 0.0}, "grader": "own.py:fails"}
    with pytest.raises(viva.FailedRunError, match=rf"{told}\. A run goes on with .* Nothing was saved yet"):
        viva.train(talk(), prompts=["1 + 1?"], test=asked, steps=1, log_path="run", **options)
    Path("asked.jsonl").write_text(json.dumps(asked[0]), encoding="utf-8")
    assert viva.cli.main(["eval", "tiny", "test_prompts_path=asked.jsonl", "grader=own.py:fails"]) == 2
    assert re.search(f"viva: error: {told}", capsys.readouterr().err)


def test_options_come_from_a_file_or_by_name_and_those_given_win(finished: viva.Run, tmp_path: Path) -> None:
    again = viva.train(
        talk(reward=viva.rewards.tournament(max_off_set_mass=1.0)),
        prompts=ROWS,
        steps=1,
        config=finished.path / "config.json",
        log_path=str(tmp_path / "again"),
        behavior_if_exists="raise",
    )
    figures = ["reward/std", "rollout/sampled_tokens"]
    assert again.metrics.loc[0, figures].equals(finished.metrics.loc[0, figures])
    assert again.config["max_steps"] == 1

    asked = viva.train(
        "critique_self_play",
        prompts=ROWS,
        steps=1,
        config={**QUICK, "prompts": {"proposal": "How many? {persona}"}, "max_tokens": 200},
        log_path=str(tmp_path / "asked"),
        max_tokens=24,
    )
    assert asked.config["max_tokens"] == 24
    assert "How many?" in (asked.path / "transcripts.jsonl").read_text()


def test_the_options_of_a_run_do_not_delete_it(finished: viva.Run, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(finished.path, path)
    config = finished.config | {"behavior_if_exists": "delete", "log_path": str(path)}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    before = files(path)
    for source in (path / "config.json", config):
        with pytest.raises(ValueError, match="already holds a run"):
            viva.train("protocol", config=source, seed=7)
    assert train_recipe("protocol", [f"config={path}/config.json", "seed=7"]) == 2
    assert files(path) == before

    own = tmp_path / "own.yaml"
    own.write_text("recipe: protocol\nbehavior_if_exists: resume\n", encoding="utf-8")
    assert read_options(own, RecipeConfig, "protocol") == {"behavior_if_exists": "resume"}


def test_conversations_are_read_by_the_class_that_wrote_them(finished: viva.Run, capsys: Any) -> None:
    last = finished.conversations[-1]
    assert [turn.segment for turn in last.turns] == ["argue", "argue", "final", "final"]
    assert [each.question for each in finished.conversations][-1] == last.question
    assert finished.conversations[1:3] == list(finished.conversations)[1:3]
    last.show()
    told = capsys.readouterr().out
    assert last.question in told
    assert "[round 2, agent 1, final]" in told
    with pytest.raises(IndexError):
        finished.conversations[4]


def test_a_run_is_measured_against_its_base(finished: viva.Run, capsys: Any) -> None:
    found = viva.evaluate(finished, ROWS[:2], against="base", kinds=["direct"], resamples=100)
    assert 0.0 <= found.figures["direct/maj@4"].value <= 1.0
    assert "differences are first less second" in capsys.readouterr().out


def test_a_run_of_a_protocol_that_is_gone_is_measured_as_the_message_says(
    finished: viva.Run, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shutil.copytree(finished.path, path)
    config = finished.config | {"protocol": "python:gone", "log_path": str(path)}
    del config["sha256"]
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match=r"'python:gone' was an object .*kinds=\['direct'\]"):
        viva.evaluate(path, ROWS[:1], num_test_conversations=1)
    found = viva.evaluate(path, ROWS[:1], kinds=["direct"], max_tokens=4, resamples=100)
    assert "direct/maj@4" in found.figures


def test_earlier_evaluations_are_shown_and_compared_without_sampling(
    finished: viva.Run, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, base = tmp_path / "own.json", tmp_path / "base.json"
    quick: dict[str, Any] = {"kinds": ["direct"], "resamples": 100, "equal_tokens": False}
    measured = viva.evaluate(finished, ROWS[:2], output=own, **quick)
    viva.evaluate(finished, ROWS[:2], checkpoint="base", output=base, **quick)
    monkeypatch.setattr("viva.recipes.evaluation.build.Engines", None)  # nothing is opened
    capsys.readouterr()
    assert viva.evaluate(own).figures == measured.figures
    assert "direct/maj@4" in capsys.readouterr().out
    assert viva.evaluate(own, against=base).figures == measured.figures
    assert "differences are first less second" in capsys.readouterr().out
    with pytest.raises(ValueError, match="of which nothing is sampled again"):
        viva.evaluate(own, num_samples=2)


def test_ctrl_c_ends_an_evaluation(finished: viva.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def measure(*_: Any) -> None:
        await asyncio.sleep(0.1)  # until the caller waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        try:
            await asyncio.sleep(20)
            ended.append("after all")
        finally:
            ended.append("tidied up")

    monkeypatch.setattr("viva.recipes.evaluation.build.evaluate", measure)
    with pytest.raises(KeyboardInterrupt):
        viva.evaluate(finished, ROWS[:2])
    assert ended == ["tidied up"]


def length_pays(conversation: viva.Conversation) -> dict[int, float]:
    assert conversation.answer is not None
    return {agent_id: float(len(text)) for agent_id, text in conversation.final_solutions.items()}


def points(conversation: viva.Conversation) -> dict[str, dict[int, float]]:
    return {
        "argue": {turn.agent_id: len(turn.text) for turn in conversation.turns if turn.segment == "argue"}
    }


async def test_a_users_function_pays_agents_in_a_running_loop(tmp_path: Path) -> None:
    run = await viva.train_async(
        talk(), reward=length_pays, prompts=ROWS, steps=1, log_path=str(tmp_path / "run"), **QUICK
    )
    for record in run.conversations:
        finals = {turn.agent_id: turn.text for turn in record.turns if turn.segment == "final"}
        assert record.rewards == {agent_id: len(text.strip()) for agent_id, text in finals.items()}


def test_a_users_function_pays_the_tokens_of_segments(tmp_path: Path) -> None:
    run = viva.train(talk(), reward=points, prompts=ROWS, steps=1, log_path=str(tmp_path / "run"), **QUICK)
    rows = [json.loads(line) for line in (run.path / "tokens.jsonl").read_text(encoding="utf-8").splitlines()]
    spans = [(turn["turn"], turn["spans"]) for row in rows for turn in row["turns"]]
    assert {index for index, _ in spans} == {0, 1}  # argue, final
    assert all(bool(found) == (index == 0) for index, found in spans)
    assert any(any(turn["advantages"]) for row in rows for turn in row["turns"] if turn["turn"] == 0)
    assert not any(any(turn["advantages"]) for row in rows for turn in row["turns"] if turn["turn"] == 1)


def test_the_shell_trains_the_same_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    debate = ROOT / "examples" / "debate.py"
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    (tmp_path / "own.py").write_text(
        "def pay(conversation):\n    return {0: 1.0, 1: 0.0}\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    options = [f"{name}={value}" for name, value in QUICK.items()]
    command = [f"protocol={debate}:DEBATE", "reward=own.py:pay", "max_steps=1", "train_prompts_path=p.jsonl"]
    assert train_recipe("protocol", [*command, *options, "log_path=first"]) == 0
    run = viva.load_run("first")
    assert all(record.rewards == {0: 1.0, 1: 0.0} for record in run.conversations)
    again = ["config=first/config.json", "log_path=second", "behavior_if_exists=raise"]
    assert train_recipe("protocol", again) == 0
    same = ["reward/mean", "optim/datums", "optim/tokens"]
    assert viva.load_run("second").metrics[same].equals(run.metrics[same])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"learnin_rate": 1.0}, "unknown option 'learnin_rate'. Did you mean 'learning_rate'"),
        ({"max_tokens": "many"}, "max_tokens must be a whole number; got a value of the kind str"),
        ({"reward": "turnament"}, "unknown reward 'turnament'.*Did you mean 'tournament'"),
        ({"reward": 3}, "a reward must be a name"),
        ({"reward": lambda one, two: {}}, "must be a function of the conversation alone"),
        ({"reward": "peer_review"}, "does not ask for proposal"),
        ({"grader": "own"}, "grader must be one of math, exact, choice"),
        (
            {"prompts": ROWS[0]},
            "must be a list of questions or rows.*mapping with query, answer. Put a row into",
        ),
        (
            {"test": {"train": ROWS, "test": ROWS}},
            "mapping with train, test.* of a DatasetDict give one split",
        ),
        ({"prompts": None}, "Must provide either train_prompts"),
        ({"model": "tiny", "model_name": "tiny"}, "model_name is given twice"),
        ({"train_prompts_path": "other.jsonl"}, "train_prompts_path is given twice .*prompts"),
        ({"test": ROWS, "test_prompts_path": "other.jsonl"}, "test_prompts_path is given twice"),
        ({"config": {"learnin_rate": 1.0}}, "unknown option 'learnin_rate'. Did you mean 'learning_rate'"),
    ],
)
def test_mistakes_raise_before_anything_is_computed(
    tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    given = {"prompts": ROWS, "reward": length_pays, "log_path": str(tmp_path / "run")} | options
    with pytest.raises(ValueError, match=told):
        viva.train(talk(), **given)
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown recipe 'critique'.*Did you mean 'critique_self_play'"):
        viva.train("critique", prompts=ROWS)


def test_a_tournament_needs_solutions(tmp_path: Path) -> None:
    from viva.conversation.critiques import read_critiques

    only = Segment(name="only", instruction=lambda view: "Criticise.", read=read_critiques)
    with pytest.raises(ValueError, match="let the reader of one of their segments return a Solution"):
        viva.train(
            Protocol(rounds=[Round("only", [only])], reward="tournament"),
            prompts=ROWS,
            log_path=str(tmp_path / "run"),
        )


def test_a_step_in_which_nothing_was_paid_ends_the_run_and_leaves_what_was_said(tmp_path: Path) -> None:
    pay: dict[int, float] = {}

    def paid(talk: viva.Conversation) -> dict[int, float]:
        return pay

    options = QUICK | {"max_retries": 0, "prompts": ROWS, "steps": 1, "log_path": tmp_path / "run"}
    with pytest.raises(RuntimeError, match="must return rewards by agent id"):
        viva.train(talk(), reward=paid, **options)
    said = viva.load_run(tmp_path / "run").conversations
    assert [len(each.turns) for each in said] == [4, 4]
    pay |= {0: 1.0, 1: 0.0}
    run = viva.train(talk(), reward=paid, **options, behavior_if_exists="resume")
    assert [each.rewards for each in run.conversations] == [pay, pay]


async def test_train_says_what_to_use_in_a_notebook() -> None:
    with pytest.raises(RuntimeError, match=r"await viva.train_async"):
        viva.train("critique_self_play", prompts=ROWS)


def test_an_environment_of_the_cookbook_is_trained_by_name(tmp_path: Path) -> None:
    quick = {name: QUICK[name] for name in ("max_tokens", "lora_rank", "learning_rate", "trackers")}
    run = viva.train(
        "environment",
        environment="guess_number",
        group_size=2,
        batch_size=4,
        steps=2,
        log_path=str(tmp_path / "run"),
        **quick,
    )
    assert list(run.metrics["rollout/groups"]) == [2, 2]
    assert (run.path / "adapter").is_dir()
    assert (run.path / "tokens.jsonl").is_file()
    assert run.conversations[0].turns == ()  # the environment keeps no record
    assert set(run.conversations[0].rewards) == {0, 1}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"environment": "chess"}, "unknown environment 'chess'; allowed: arithmetic, gsm8k"),
        ({"environment": "nowhere.py:x"}, "there is no file 'nowhere.py'"),
        (
            {"environment_options": {"levl": 1}},
            "environment_options names 'levl', which arithmetic does not take",
        ),
        (
            {"grader": "exact", "num_agents": 7},
            "num_agents, grader would change nothing: environment=arithmetic",
        ),
        ({"test": "nowhere.jsonl"}, "test_prompts_path would change nothing"),
        ({"steps": None, "max_steps": None}, "max_steps must say how long the run is"),
    ],
)
def test_mistakes_about_an_environment_are_told_first(
    tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        viva.train(
            "environment", **({"environment": "arithmetic", "log_path": str(tmp_path / "run")} | options)
        )
    assert not (tmp_path / "run").exists()


def test_a_verifier_of_ones_own_is_the_reward_of_math_efficiency(tmp_path: Path) -> None:
    asked: list[str] = []

    def is_right(text: str, answer: str) -> bool:
        asked.append(answer)
        return len(text) % 2 == 0

    quick = {
        name: QUICK[name] for name in ("max_tokens", "lora_rank", "learning_rate", "trackers", "eval_every")
    }
    run = viva.train(
        "math_efficiency",
        strategies=["iid"],
        grader=is_right,
        prompts=[{"question": row["query"], "answer": row["answer"]} for row in ROWS],
        group_size=2,
        batch_size=4,
        steps=1,
        log_path=str(tmp_path / "run"),
        **quick,
    )
    assert set(asked) <= {str(row["answer"]) for row in ROWS}
    assert asked
    assert run.config["grader"].startswith("python:is_right-")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_rows_of_a_call_that_is_refused_or_of_an_evaluation_stand_beside_those_of_the_run(
    finished: viva.Run,
) -> None:
    before = files(finished.path.parent)
    with pytest.raises(ValueError, match="already holds a run"):
        viva.train(
            "critique_self_play",
            prompts=["other"],
            test=["another"],
            log_path=finished.path,
            steps=1,
            **QUICK,
        )
    with pytest.raises(ValueError, match="num_samples must be 1 or more"):
        finished.evaluate([{"query": "1 + 1?", "answer": 2}], num_samples=0)
    finished.evaluate([{"query": "1 + 1?", "answer": 2}], kinds=["direct"], max_tokens=4)
    after = files(finished.path.parent)
    # what was written lists what is the run's own
    assert {path: after[path] for path in before if not path.endswith("written.jsonl")} == {
        path: content for path, content in before.items() if not path.endswith("written.jsonl")
    }
    again = finished.evaluate(kinds=["direct"], max_tokens=4)
    assert [each.question for each in again.asked] == [row["query"] for row in ROWS[:2]]


def test_a_run_as_the_model_is_refused_with_what_to_give(finished: viva.Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a run, not a model: give the model .* load_checkpoint_path"):
        viva.train(
            "critique_self_play", model=finished.path, prompts=ROWS, log_path=tmp_path / "run", steps=1
        )
    assert not (tmp_path / "run").exists()


def test_texts_with_other_line_breaks_and_a_torn_last_line_are_read_back(tmp_path: Path) -> None:
    rows = [row | {"query": f"{row['query']}\u2028\x85{place}"} for place, row in enumerate(ROWS)]
    debate = talk(reward=viva.rewards.tournament(max_off_set_mass=1.0))
    run = viva.train(debate, prompts=rows, steps=1, log_path=tmp_path / "run", **QUICK)
    with (run.path / "transcripts.jsonl").open("a") as file:
        file.write('{"step": 1, "gro')
    questions = [row["query"] for row in rows]
    assert len(run.conversations) == 2
    assert all(each.question in questions for each in run.conversations)


def test_values_may_be_frames_runs_paths_and_numbers_of_numpy(finished: viva.Run, tmp_path: Path) -> None:
    import numpy as np
    import pandas as pd

    frame = pd.DataFrame([{"query": "1 + 1?", "answer": 2}, {"query": "Why?", "answer": None}])
    quick = {name: QUICK[name] for name in ("max_tokens", "lora_rank", "learning_rate", "trackers")}
    viva.train(
        "math_efficiency",
        prompts=frame[:1],
        test=[{"query": "2 + 2?", "answer": np.int64(4)}],
        strategies="iid",
        group_size=2,
        batch_size=2,
        steps=1,
        eval_every=0,
        log_path=tmp_path / "run",
        **quick,
    )
    (train,) = tmp_path.glob("run.train-*.jsonl")
    (test,) = tmp_path.glob("run.test-*.jsonl")
    assert json.loads(train.read_text()) == {"query": "1 + 1?", "answer": 2}
    assert json.loads(test.read_text()) == {"query": "2 + 2?", "answer": 4}
    found = finished.evaluate(
        frame, against="base", judge=[finished, "base"], max_tokens=4, output=tmp_path / "found.json"
    )
    assert [each.answer for each in found.asked] == ["2", None]
    with pytest.raises(ValueError, match="prompt 2 must be a text, or a row of texts and numbers"):
        viva.evaluate("tiny", [{"query": "1 + 1?"}, {"query": object()}])


def test_samples_behind_a_hint_and_second_attempts_are_conversations_of_the_run(tmp_path: Path) -> None:
    quick = {name: QUICK[name] for name in ("max_tokens", "lora_rank", "learning_rate", "trackers")}
    run = viva.train(
        "math_efficiency",
        strategies=["prompt_augmentation", "feedback"],
        hint="Count slowly.",
        prompts=ROWS,
        group_size=2,
        batch_size=4,
        steps=1,
        eval_every=0,
        log_path=tmp_path / "run",
        **quick,
    )
    hinted, second = run.conversations
    assert {hinted.question, second.question} <= {row["query"] for row in ROWS}
    assert hinted.turns[0].prompt == f"Count slowly.\n\n{hinted.question}"
    assert [(turn.agent_id, turn.round_index) for turn in second.turns] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert second.turns[0].prompt == second.question
    assert second.turns[2].prompt.startswith("Your answer is ")
    lines = [json.loads(line) for line in (run.path / "transcripts.jsonl").read_text().splitlines()]
    for each, line in zip((hinted, second), lines, strict=True):
        assert each.answer == str(next(row["answer"] for row in ROWS if row["query"] == each.question))
        assert list(each.rewards.values()) == line["rewards"]
        assert set(each.correct) == {0, 1}
