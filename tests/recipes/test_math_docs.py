"""docs/math_efficiency.md says what the code does: its options, commands and rules are read and tried here."""

import shlex
import typing
from pathlib import Path

import chz
import pytest
from chz.blueprint import Blueprint
from pages import blocks, codes, documented_options, page, tables

from viva.recipes.config import parse_options
from viva.recipes.math_efficiency import Config
from viva.recipes.strategies import STRATEGIES
from viva.view.estimates import EstimateOptions

PAGE = page("math_efficiency.md")
COMMANDS = ("viva train math_efficiency ", "viva train math_efficiency ")


def test_every_option_is_documented_once_with_its_default() -> None:
    options = {name: str(default) for name, default in chz.asdict(Config()).items()}
    assert {name: default for name, (default, _) in documented_options(PAGE).items()} == options


def test_every_allowed_word_of_the_recipes_own_options_is_named() -> None:
    hints = typing.get_type_hints(Config)
    for name, (_, meaning) in documented_options(PAGE).items():
        kinds = [hints[name], *typing.get_args(hints[name])]
        words = [
            word for kind in kinds if typing.get_origin(kind) is typing.Literal for word in kind.__args__
        ]
        own = PAGE.split("All others mean")[0]
        if f"| `{name}` |" in own:
            assert set(words) <= set(codes(meaning)), name


def test_the_strategies_are_those_of_the_page() -> None:
    (table,) = tables(PAGE, "strategy")
    assert [codes(row[0])[0] for row in table] == list(STRATEGIES)


def test_the_options_of_estimating_are_those_of_the_page() -> None:
    (table,) = [table for table in tables(PAGE, "option") if len(table[0]) == 2]
    assert [codes(row[0])[0] for row in table] == list(chz.asdict(EstimateOptions()))


def test_every_command_of_the_page_is_one_that_could_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("problems.jsonl").write_text('{"question": "What is 7 + 5?", "answer": "7+5=12\\n#### 12"}\n')
    (tmp_path / "examples").symlink_to(Path(__file__).parents[2] / "examples")
    lines = "".join(blocks(PAGE, "bash")).replace("\\\n", " ").splitlines()
    estimates = [line for line in lines if line.startswith("viva estimate ")]
    trainings = [line for line in lines if line.startswith(COMMANDS)]
    assert (len(trainings), len(estimates), len(lines)) == (5, 2, 7)
    for line in trainings:
        arguments = shlex.split(next(line.removeprefix(each) for each in COMMANDS if line.startswith(each)))
        config = Blueprint(Config).make_from_argv(arguments)
        if config.hf_dataset_name is not None:  # is not fetched here
            assert (config.hf_prompt_column, config.hf_answer_column) == ("question", "answer")
            continue
        chz.replace(config, model_name="some/model", learning_rate=1e-4).make_plan()
    for line in estimates:
        parse_options(EstimateOptions, shlex.split(line)[3:])
