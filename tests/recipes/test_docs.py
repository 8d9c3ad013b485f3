"""The pages in docs/ say what the code does: their tables, commands and examples are read and tried here."""

import ast
import asyncio
import inspect
import json
import re
import shlex
import typing
from dataclasses import fields
from pathlib import Path

import chz
import pytest
from chz.blueprint import Blueprint
from pages import ROOT, blocks, codes, documented_options, generic, page, script_the_engine, tables

import viva.engine
from viva.engine import EngineLimits, LocalServiceClient
from viva.judging.comparison import VERDICT_PREFIX
from viva.recipes.conversation_preference_rl import Config
from viva.recipes.loop import run_recipe
from viva.testing import ScriptedSamplingClient, crashing, honest, tiny_renderer, turn_of

PAGE = page("conversation_preference_rl.md")
ENGINE_PAGE = page("engine.md")
COMMAND = "viva train conversation_preference_rl "


# options


def test_every_option_is_documented_once_with_its_default() -> None:
    options = {name: str(default) for name, default in chz.asdict(Config()).items()}
    assert {name: default for name, (default, _) in documented_options(PAGE).items()} == options


def test_every_allowed_word_of_an_option_is_named() -> None:
    for name, kind in typing.get_type_hints(Config, include_extras=False).items():
        for word in typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ():
            assert f"`{word}`" in documented_options(PAGE)[name][1], (name, word)


def test_the_options_that_a_resumed_run_may_change_are_named(tmp_path: Path) -> None:
    sentence = re.search(r"On resume these may change:(.*?)\. The prompts", PAGE, re.S)
    assert sentence is not None
    plan = Config(
        train_prompts=["a"], model_name="some/model", learning_rate=1e-4, log_path=str(tmp_path)
    ).make_plan()
    assert set(codes(sentence.group(1))) == set(plan.free_options)


def test_a_resumed_run_that_samples_ahead_saves_as_before(tmp_path: Path) -> None:
    options = {
        "train_prompts": ["a"],
        "learning_rate": 1e-4,
        "log_path": str(tmp_path),
        "base_url": "http://s",
    }
    ahead, plain = (Config(**options, max_staleness=staleness).make_plan() for staleness in (1, 0))
    assert plain.free_options - ahead.free_options == {"save_every"}


def test_what_the_code_names_as_options_are_options() -> None:
    known = set(chz.asdict(Config()))
    assert {word.partition("=")[0] for word in codes(PAGE) if re.fullmatch(r"[a-z_]+=\S+", word)} <= known


# commands and examples


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the page's commands name."""
    monkeypatch.chdir(tmp_path)
    (line,) = [code for code in codes(PAGE) if code.startswith('{"query"')]
    (tmp_path / "prompts.jsonl").write_text(line + "\n")
    (tmp_path / "test.jsonl").write_text(line + "\n")
    (tmp_path / "judge.txt").write_text("Prefer the odd one.")
    (makes_data,) = [block for block in blocks(PAGE, "python") if "save_to_disk" in block]
    exec(makes_data, {})
    return tmp_path


def test_every_command_of_the_page_is_a_run_that_could_start(data: Path) -> None:
    lines = "".join(blocks(PAGE, "bash")).replace("\\\n", " ").splitlines()
    assert len(lines) == 8
    sizes: list[tuple[int, int]] = []
    for line in lines:
        assert line.startswith(COMMAND)
        config = Blueprint(Config).make_from_argv(shlex.split(line.removeprefix(COMMAND)))
        if config.hf_dataset_name != "openai/gsm8k":  # it would be fetched
            plan = chz.replace(config, model_name="some/model", learning_rate=1e-4).make_plan()
            sizes.append((len(plan.order.items), len(plan.test)))
    assert sizes == [(1, 0), (2, 0), (1, 1), (15, 5), (1, 0), (1, 0), (1, 0)]


def test_the_example_with_scripted_agents_runs() -> None:
    (example,) = [block for block in blocks(PAGE, "python") if "viva.testing" in block]
    exec(example, {})


# a whole run of the recipe, with an engine that is scripted


def script(prompt: str, call: int):
    """Agents answer their number, one call fails, direct answers are right; the judge's words do not matter."""
    if call == 20:
        crashing()
    if prompt.endswith(VERDICT_PREFIX):
        return ""
    return honest(f"{turn_of(prompt)[0]}") if "\nYou are agent " in prompt else "The answer is 1."


def larger_wins(prompt: str) -> dict[str, float]:
    first, second = re.findall(r"Solution [AB]:\n> (\d)", prompt)
    return {"A": 0.6, "B": 0.2, "T": 0.1} if first > second else {"A": 0.2, "B": 0.6, "T": 0.1}


@pytest.fixture
def finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ScriptedSamplingClient]:
    """A run with a judge's prompt of its own."""
    (example,) = [block for block in blocks(PAGE, "python") if "judge_prompt" in block]
    names: dict[str, typing.Any] = {}
    exec(example, names)
    renderer = tiny_renderer()
    sampler = ScriptedSamplingClient(renderer=renderer, script=script, next_token=larger_wins)

    script_the_engine(monkeypatch, sampler)
    test_path = tmp_path / "test.jsonl"
    test_path.write_text('{"query": "Which agent is in the middle?", "answer": 1}\n')
    config = Config(
        model_name="some/model",
        train_prompts_path=str(test_path),
        test_prompts_path=str(test_path),
        max_rounds=2,
        batch_size=6,
        max_steps=1,
        learning_rate=1e-4,
        tournament_pattern="all_pairs_both_ways",
        judge_prompt="Prefer the odd one.",
        log_path=str(tmp_path / "run"),
    )
    assert asyncio.run(run_recipe(config)) is None
    return tmp_path / "run", sampler


def test_metrics_and_files_of_a_run_are_those_of_the_page(finished_run) -> None:
    folder, sampler = finished_run
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row.pop("step") for row in rows] == [0, 1]
    written = {key for row in rows for key in row}
    documented = {name for table in tables(PAGE, "metric") for row in table for name in codes(row[0])}
    assert "test/conversation/rollout/groups" in written
    local = {"optim/tree_token_ratio"}  # this engine is a scripted one
    open_prompts = {"test/judged/<figure>"}  # all answers are known here
    assert {generic(key) for key in written} == documented - {
        "test/conversation/<metric>"
    } - local - open_prompts
    names = {name for table in tables(PAGE, "in `log_path`") for row in table for name in codes(row[0])}
    assert {path.name for path in folder.iterdir()} == names - {
        "model",
        *("journal", "trackers.json", "tensorboard", "wandb", "export"),
    }
    assert any("Prefer the odd one." in prompt for prompt in sampler.prompts)


# messages


def texts_of_the_source() -> str:
    """All strings of the source; NUL where a value is put in, and between strings."""
    found: list[str] = []
    for path in sorted((ROOT / "src" / "viva").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            found += [
                str(part.value) if isinstance(part, ast.Constant) else "\0"
                for part in parts
                if isinstance(part, ast.Constant | ast.FormattedValue)
            ]
            found.append("\0" * isinstance(node, ast.JoinedStr | ast.Constant))
    return "".join(found)


def test_every_message_of_the_page_is_one_of_the_code() -> None:
    messages = [message for table in tables(PAGE, "message") for row in table for message in codes(row[0])]
    assert len(messages) > 20
    texts = texts_of_the_source()
    for message in messages:
        assert message in texts, message


# the page about the engine


def refused_by(client: type) -> set[str]:
    """Methods of the SDK's client that raise `NotImplementedError` with a sentence."""
    return {name for name in dir(client) if "_refusal" in getattr(getattr(client, name), "__qualname__", "")}


def test_the_engines_methods_are_those_of_the_page() -> None:
    inherited = {
        "result",
        "result_async",
        "model_id",
        "answers_together",
        "precision",
        "takes_mask",
        "takes_temperature",
        "end_ids",
        "context_length",
    }
    # in the SDK, too, and those that it has not
    alone = {"get_tokenizer", "create_rest_client", "get_telemetry", "close"}
    alone |= {"begin_average", "update_average", "save_average_and_get_sampling_client", "stream"}
    (table,) = tables(ENGINE_PAGE, "client")
    for name, methods in ((codes(row[0])[0], codes(row[1])) for row in table):
        client = getattr(viva.engine, name)
        public = {each for each in dir(client) if not each.startswith("_")} - inherited - refused_by(client)
        twins = {f"{method}_async" for method in methods if method not in alone}
        assert public == {*methods, *twins}, name


def test_what_the_page_calls_a_servers_is_refused() -> None:
    sentence = re.search(r"that only servers answer \((.*?)\)", ENGINE_PAGE, re.S)
    assert sentence is not None
    clients = [
        viva.engine.LocalServiceClient,
        viva.engine.LocalTrainingClient,
        viva.engine.LocalSamplingClient,
    ]
    refused = set().union(*map(refused_by, clients))
    assert codes(sentence.group(1))
    assert set(codes(sentence.group(1))) <= refused


def test_the_engines_settings_have_the_defaults_of_the_page() -> None:
    (table,) = tables(ENGINE_PAGE, "field")
    limits = {field.name: str(getattr(EngineLimits(), field.name)) for field in fields(EngineLimits)}
    assert {codes(row[0])[0]: codes(row[1])[0] for row in table} == limits
    (table,) = tables(ENGINE_PAGE, "argument")
    arguments = list(inspect.signature(LocalServiceClient).parameters.values())
    assert {codes(row[0])[0]: codes(row[1])[0] for row in table} == {
        argument.name: str(argument.default) for argument in arguments
    }


def test_the_tests_that_the_page_names_are_there() -> None:
    (table,) = tables(ENGINE_PAGE, "claim")
    for row in table:
        for name in codes(row[2]):
            assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("name", ["conversation_preference_rl.md", "critique_self_play.md", "engine.md"])
def test_pages_are_short_and_their_links_lead_somewhere(name: str) -> None:
    text = page(name)
    assert text.count("\n") < 300
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / target).exists(), target
