"""docs/critique_self_play.md says what the code does: its tables, commands and formulas are read and tried here."""

import asyncio
import json
import random
import re
import shlex
import typing
from dataclasses import fields
from pathlib import Path

import chz
import pytest
from chz.blueprint import Blueprint
from pages import blocks, codes, documented_options, generic, page, script_the_engine, tables

import viva.cli
from viva.judging.comparison import VERDICT_PREFIX
from viva.recipes.config import parse_options
from viva.recipes.critique_self_play import Config
from viva.recipes.loop import run_recipe
from viva.rewards.review import PRESETS, ReviewRules
from viva.selfplay.critique import critique_protocol
from viva.testing import ScriptedSamplingClient, tiny_renderer
from viva.view.rescore import RescoreOptions, rescore

PAGE = page("critique_self_play.md")
FIRST_PAGE = page("conversation_preference_rl.md")
COMMAND = "viva train critique_self_play "


def test_every_option_is_documented_once_with_its_default() -> None:
    options = {name: str(default) for name, default in chz.asdict(Config()).items()}
    assert {name: default for name, (default, _) in documented_options(PAGE).items()} == options


def test_every_allowed_word_of_the_recipes_own_options_is_named() -> None:
    own = {
        name: kind
        for name, kind in typing.get_type_hints(Config).items()
        if name in codes(PAGE.split("All others")[0])
    }
    words = [
        (name, word)
        for name, kind in own.items()
        if typing.get_origin(kind) is typing.Literal and documented_options(PAGE)[name][1]
        for word in typing.get_args(kind)
    ]
    assert {name for name, _ in words} >= {"preset", "revision_votes"}
    for name, word in words:
        if name != "on_failure":  # a matter of the first page
            assert f"`{word}`" in documented_options(PAGE)[name][1], (name, word)


def test_the_presets_are_those_of_the_page() -> None:
    (table,) = tables(PAGE, "choice")
    shown = {codes(name)[0]: (codes(paper)[0], codes(robust)[0]) for name, paper, robust, _ in table}
    assert shown == {
        field.name: tuple(str(getattr(PRESETS[preset], field.name)) for preset in ("paper", "robust"))
        for field in fields(ReviewRules)
        if field.name not in ("prior_precision", "weights")
    }
    assert PRESETS["paper"].weights == {"r_sol": 1.0, "r_meta": 1.0, "r_diag": 2.0}
    assert PRESETS["robust"].weights == {"r_sol": 1.0, "r_meta": 0.0, "r_diag": 0.0}


def test_the_protocol_is_that_of_the_page() -> None:
    (table,) = tables(PAGE, "round")[:1]
    rows = [(row[0].split(" ")[1] if row[0] else None, codes(row[1])[0], row[3]) for row in table]
    declared = [
        (round_.name if lane == 0 else None, segment.name, segment.stream or "nothing")
        for round_ in critique_protocol(4, comparisons=True).rounds
        for lane, segment in enumerate(round_.segments)
    ]
    assert rows == declared


def test_every_command_of_the_page_is_one_that_could_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"query": "What is 7 + 5?", "answer": 12}\n')
    lines = "".join(blocks(PAGE, "bash")).replace("\\\n", " ").splitlines()
    plans = [line for line in lines if line.startswith(COMMAND)]
    rescorings = [line for line in lines if line.startswith("viva rescore ")]
    checks = [line for line in lines if line.startswith("viva protocol check ")]
    assert (len(plans), len(rescorings), len(checks), len(lines)) == (4, 2, 2, 8)
    for line in plans:
        config = Blueprint(Config).make_from_argv(shlex.split(line.removeprefix(COMMAND)))
        chz.replace(config, model_name="some/model", learning_rate=1e-4).make_plan()
    for line in rescorings:
        parse_options(RescoreOptions, shlex.split(line)[3:])
    monkeypatch.chdir(Path(__file__).parents[2])
    for line in checks:
        assert viva.cli.main(shlex.split(line)[1:]) == 0


def test_the_rules_of_rescoring_are_those_of_the_page() -> None:
    (table,) = tables(PAGE, "rule")
    assert sorted(name for row in table for name in codes(row[0])) == sorted(chz.asdict(RescoreOptions()))


# a whole run of the recipe, with an engine that is scripted


def script(prompt: str, call: int) -> str:
    """Agents that disagree: what they say depends on nothing but the prompt."""
    noise = random.Random(prompt)
    letters = re.findall(r"^Solution ([A-Z]):$", prompt, re.M)
    noise.shuffle(letters)
    if "Check and rank" in prompt:
        return f"Ranking: {noise.choice('>=').join(letters)}"
    if "Criticise" in prompt:
        return "\n".join(f"Critique of {letter}: add again." for letter in letters)
    return (
        f"{noise.choice(['Revise', 'Defend'])}: {noise.randint(1, 2) * '1'}"
        if "Revise" in prompt
        else "1" * noise.randint(1, 2)
    )


def next_token(prompt: str) -> dict[str, float]:
    noise = random.Random(prompt)
    return (
        {"A": noise.random() / 2, "B": noise.random() / 2, "T": 0.01}
        if prompt.endswith(VERDICT_PREFIX)
        else {}
    )


@pytest.fixture
def finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sampler = ScriptedSamplingClient(renderer=tiny_renderer(), script=script, next_token=next_token)
    script_the_engine(monkeypatch, sampler)
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(f'{{"query": "What is {number} - {number - 1}?", "answer": 1}}\n' for number in range(4))
    )
    config = Config(
        model_name="some/model",
        train_prompts_path=str(path),
        test_prompts_path=str(path),
        num_test_conversations=1,
        batch_size=16,
        max_steps=1,
        learning_rate=1e-4,
        votes_on_own=True,
        log_path=str(tmp_path / "run"),
    )
    assert asyncio.run(run_recipe(config)) is None
    return tmp_path / "run"


def documented(text: str) -> set[str]:
    return {name for table in tables(text, "metric") for row in table for name in codes(row[0])}


def family(metric: str) -> str:
    """The name under which this page documents a metric."""
    metric = generic(metric)
    metric = re.sub(r"^judge/(ranking|verdict)/", "judge/<round>/", metric)
    metric = re.sub(r"^judge/revision/.*", "judge/revision/<figure>", metric)
    metric = re.sub(r"^parse/\w+/\w+$", "parse/<segment>/<status>", metric)
    return re.sub(r"^(credit/r_\w+)/.*", r"\1/<figure>", metric)


def test_metrics_and_transcripts_of_a_run_are_those_of_the_page(finished_run: Path) -> None:
    rows = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    written = {family(key) for row in rows for key in row if key != "step"}
    both = documented(PAGE) & documented(FIRST_PAGE)
    flips = {"flip/right_to_wrong", "flip/wrong_to_right"}
    assert both == {"correct/first", "correct/final", *flips, "reward_truth_gap"}  # of other turns and scores
    assert written - documented(FIRST_PAGE) == documented(PAGE) - both
    line = json.loads((finished_run / "transcripts.jsonl").read_text().splitlines()[0])
    for key in ("rules", "comparisons", "scores", "streams", "correct_initial", "correct"):
        assert f"`{key}`" in PAGE
        assert line["record"][key]


def test_a_finished_run_can_be_scored_again(finished_run: Path) -> None:
    result = rescore(finished_run, RescoreOptions(preset="paper"))
    assert result.num_conversations == 4
