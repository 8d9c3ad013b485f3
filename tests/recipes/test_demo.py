"""A demonstration is its recipe with options that the command line may change."""

import pytest

from viva.recipes.data import load_jsonl
from viva.recipes.demo import main_with, problem_options


@pytest.mark.parametrize(
    ("argv", "seed", "given"),
    [
        ([], 0, ["a=1", "seed=0"]),
        (["seed=7", "a=2"], 7, ["seed=7", "a=2"]),
        (["seed=x"], 0, ["a=1", "seed=x"]),  # for the recipe to refuse
        (["--help"], 0, ["a=1", "seed=0", "--help"]),
    ],
)
def test_what_the_command_line_says_wins_over_the_demonstrations_options(argv, seed, given):
    seen = []

    def options_for_seed(asked):
        seen.append(asked)
        return {"a": "1", "seed": str(asked)}

    assert main_with(lambda arguments: seen.append(arguments) or 5, options_for_seed, argv) == 5
    assert seen == [seed, given]


def test_problems_to_train_on_follow_the_seed_and_those_to_test_on_do_not(tmp_path):
    first, second = (problem_options(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    train = [list(load_jsonl(options["train_prompts_path"])) for options in (first, second)]
    test = [list(load_jsonl(options["test_prompts_path"])) for options in (first, second)]
    assert train[0] != train[1]
    assert test[0] == test[1]
    assert not {item.question for item in train[0]} & {item.question for item in test[0]}
