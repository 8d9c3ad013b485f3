"""The page of rewards names every reward, and every reward's file names its paper."""

import importlib
import re

import pytest
from pages import codes, page, tables

from viva.recipes.programs import train_recipe
from viva.rewards import NAMES, find_reward

(TABLE,) = tables(page("rewards.md"), "`reward=`")


def test_every_name_has_a_row() -> None:
    rows = [name for row in TABLE for name in codes(row[0])]
    assert set(NAMES) <= set(rows)
    assert set(rows) - set(NAMES) == {"shuffled_NAME", "path.py:FUNCTION"}


@pytest.mark.parametrize("name", NAMES)
def test_the_row_says_what_the_reward_asks_for(name: str) -> None:
    (row,) = [row for row in TABLE if name in codes(row[0])]
    reward = find_reward(name)
    if name == "shuffled":
        return
    assert ("judge" in row[2]) == (reward.judge is not None)
    assert ("scorer" in row[2]) == (reward.scorer is not None)
    paper = re.search(r"\d{4}\.\d{5}", row[6])
    if paper is not None and name != "log_probability":
        assert paper[0] in (importlib.import_module(type(reward).__module__).__doc__ or "")


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_paid_as_the_row_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = [row for row in TABLE if name in codes(row[0])]
    options = ['strategies=["iid"]', f"reward={name}", 'train_prompts=["a"]', "log_path=/dev/null/run"]
    assert train_recipe("math_efficiency", options) == 2
    refused = "pays conversations" in capsys.readouterr().err
    assert refused == (row[3].startswith("no"))
