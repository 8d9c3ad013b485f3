import json

import pytest

from viva.judging.answers import is_correct
from viva.judging.reasoning_gym import TEST_SEED, find_problem
from viva.recipes.config import DataOptions
from viva.recipes.data import generated_record, load_prompts, load_test_prompts
from viva.training.data import prompts_digest

pytest.importorskip("reasoning_gym")

SUMS = "reasoning_gym:chain_sum,max_terms=3,size=30"


def test_a_family_gives_problems_to_train_and_others_to_test():
    train, test = load_prompts(DataOptions(train_prompts_path=SUMS, max_test_samples=20))
    assert (len(train), len(test)) == (30, 20)
    assert not {item.question for item in train} & {item.question for item in test}
    assert f"seed={TEST_SEED}" in str(test[0].answer)
    for item in [*train, *test]:
        problem = find_problem(str(item.answer))
        assert problem is not None
        assert problem.question == item.question
        assert is_correct(problem.answer, str(item.answer))


def test_the_same_options_give_the_same_prompts_in_training_and_evaluation():
    options = DataOptions(train_prompts_path=SUMS, max_train_samples=12, max_test_samples=10)
    train, test = load_prompts(options)
    again = load_prompts(options)
    assert prompts_digest(train, test) == prompts_digest(*again)
    assert len(train) == 12
    assert load_test_prompts(options) == test


def test_test_problems_that_are_training_problems_are_dropped_and_counted(capsys):
    narrow = "reasoning_gym:chain_sum,max_terms=2,max_digits=1,size=60"
    train, test = load_prompts(DataOptions(train_prompts_path=narrow, max_test_samples=100))
    told = " ".join(capsys.readouterr().out.split())
    questions = [item.question for item in test]
    assert 0 < len(questions) == len(set(questions))
    assert not set(questions) & {item.question for item in train}
    assert "test problems of reasoning_gym:chain_sum" in told
    assert "are training problems" in told


def test_a_test_set_of_training_problems_alone_is_refused():
    same = DataOptions(train_prompts_path=SUMS, test_prompts_path=f"{SUMS},seed=0")
    with pytest.raises(ValueError, match="are among the training problems; widen"):
        load_prompts(same)


def test_generated_tests_are_kept_apart_from_a_file(tmp_path):
    held_out = load_test_prompts(DataOptions(test_prompts_path=SUMS, max_test_samples=3))
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"query": held_out[0].question, "answer": "1"}) + "\n")
    test = load_test_prompts(
        DataOptions(train_prompts_path=str(path), test_prompts_path=SUMS, max_test_samples=2)
    )
    assert test == held_out[1:]


def test_the_record_has_version_and_whole_names():
    record = generated_record(DataOptions(train_prompts_path=SUMS, max_test_samples=10))
    assert record["reasoning_gym"] == {
        "version": "0.1.25",
        "train": "reasoning_gym:chain_sum,max_terms=3,seed=0,size=30",
        "test": f"reasoning_gym:chain_sum,max_terms=3,seed={TEST_SEED},size=200",
    }
    assert generated_record(DataOptions(train_prompts_path="x.jsonl")) == {}


def test_an_unknown_family_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="Did you mean 'chain_sum'"):
        load_prompts(DataOptions(train_prompts_path="reasoning_gym:chainsum"))
