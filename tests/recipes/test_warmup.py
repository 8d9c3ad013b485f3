"""Supervised warm-up: its examples, its batches, its step, and whole runs on the built-in policy."""

import json
from pathlib import Path

import numpy as np
import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from viva.engine import LocalServiceClient
from viva.eval.records import Answer, Asked
from viva.judging.answers import CHECKS, is_correct
from viva.judging.comparison import VERDICT_PREFIX, Comparison, Outcome
from viva.judging.judge import VERDICT_SCORES, JudgeOptions, PolicySelfComparisonJudge, parse_verdict
from viva.recipes.demo import write_problems
from viva.recipes.demonstrations import (
    JudgeEvaluator,
    Pair,
    _pair,
    _shuffled,
    file_example,
    read_messages,
    verdicts,
)
from viva.recipes.programs import train_recipe
from viva.recipes.warmup import Config
from viva.testing import tiny_renderer
from viva.tiny import model_path
from viva.training.data import Example, ExampleDataset, PromptOrder
from viva.training.update import UpdateConfig, imitate

tokens = st.lists(st.integers(0, 99), min_size=1, max_size=9)


@given(tokens, tokens)
def test_a_datum_weighs_the_completion_alone(prompt, completion):
    datum = Example(prompt=tuple(prompt), completion=tuple(completion)).datum()
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy().tolist()
    weights = datum.loss_fn_inputs["weights"].to_numpy()
    assert datum.model_input.to_ints() + targets[-1:] == [*prompt, *completion]
    assert [target for target, weight in zip(targets, weights, strict=True) if weight] == completion
    assert len(targets) == len(weights) == len(prompt) + len(completion) - 1


@given(st.integers(1, 12), st.integers(1, 7), st.integers(0, 3))
def test_every_pass_has_every_example_once(count, batch_size, seed):
    examples = tuple(Example(prompt=(0,), completion=(number,)) for number in range(count))
    order = PromptOrder(
        items=examples, seed=seed, groups_per_batch=batch_size, num_groups=2 * count * batch_size
    )
    data = ExampleDataset(order=order)
    assert len(data) == 2 * count
    seen = [each.completion[0] for step in range(len(data)) for each in data.order.batch(step)]
    for start in range(0, len(seen) - count + 1, count):
        assert sorted(seen[start : start + count]) == list(range(count))


@given(tokens, tokens)
def test_an_example_is_read_back_as_it_was_written(prompt, completion):
    example = Example(prompt=tuple(prompt), completion=tuple(completion), kind="ranking")
    assert Example.of(json.loads(json.dumps(example.record()))) == example


async def test_the_loss_is_that_of_the_sampler_and_falls():
    client = LocalServiceClient(device="cpu").create_lora_training_client(str(model_path()), rank=4)
    examples = [
        Example(prompt=(5, 6, 7), completion=(8, 9)),
        Example(prompt=(7, 5), completion=(6, 8, 5)),
    ]
    sampler = client.save_weights_and_get_sampling_client()
    expected: list[float] = []
    for example in examples:
        whole = tinker.ModelInput.from_ints([*example.prompt, *example.completion])
        logprobs = await sampler.compute_logprobs_async(whole)
        expected += [-value for value in logprobs[len(example.prompt) :]]
    config = UpdateConfig(learning_rate=1e-2)
    losses = [
        (await imitate(client, [each.datum() for each in examples], config))["imitation/nll"]
        for _ in range(6)
    ]
    assert losses[0] == pytest.approx(np.mean(expected), abs=1e-4)
    assert losses[-1] < losses[0] - 0.5


def answered(*answers):
    """A problem whose answer is 7, with replies ``(text, is right)``; an empty text is one that was cut."""
    return Asked(
        question="3 + 4?",
        answer="7",
        answers=tuple(
            Answer(right=right, vote=text or None, finished=bool(text), num_tokens=3, text=text)
            for text, right in answers
        ),
    )


@pytest.mark.parametrize(
    ("answers", "pair"),
    [
        ([("It is 7.", True), ("It is 9.", False)], ("It is 7.", "It is 9.")),
        ([("9 + 9 is 9 apples", False)], ("9 + 9 is 7 apples", "9 + 9 is 9 apples")),
        ([("It is 7.", True)], None),
        ([("", False)], None),
    ],
)
def test_a_pair_differs_in_truth_and_not_in_form(answers, pair):
    found = _pair(answered(*answers), is_correct)
    assert found == (None if pair is None else Pair("3 + 4?", *pair))


@pytest.mark.parametrize(
    ("grader", "known", "wrong", "right"),
    [
        ("choice", "B", "I think it is (A).", "B"),
        ("choice", "B", "The answer is A) 15 apples", None),
        ("choice", "B) 15 apples", "(A) 12 apples", None),
        ("exact", "cat", "The answer is dog", "The answer is cat"),
    ],
)
def test_a_made_up_reply_is_kept_only_if_the_grader_finds_it_right(grader, known, wrong, right):
    check = CHECKS[grader]
    reply = Answer(right=False, vote=check.vote(wrong), finished=True, num_tokens=3, text=wrong)
    found = _pair(Asked(question="Which?", answer=known, answers=(reply,)), check.is_right)
    assert found == (None if right is None else Pair("Which?", right, wrong))


def test_a_verdict_is_the_label_of_the_right_one_in_both_orders():
    renderer = tiny_renderer()
    first, second = verdicts(renderer, Pair("3 + 4?", "It is 7.", "It is 9."), "logprob")
    for example, label, shown in ((first, "A", ("7", "9")), (second, "B", ("9", "7"))):
        assert renderer.tokenizer.decode(list(example.completion)).startswith(f'{label}"}}')
        prompt = renderer.tokenizer.decode(list(example.prompt))
        assert prompt.endswith(VERDICT_PREFIX)
        assert prompt.index(f"It is {shown[0]}.") < prompt.index(f"It is {shown[1]}.")
        assert example.completion[-1] == renderer.get_stop_sequences()[0]


def test_a_written_verdict_has_the_right_reply_as_its_reasoning():
    renderer = tiny_renderer()
    written = verdicts(renderer, Pair("3 + 4?", "It is 7.", "It is 9."), "verdict")
    for example, label in zip(written, "AB", strict=True):
        assert not renderer.tokenizer.decode(list(example.prompt)).endswith(VERDICT_PREFIX)
        text = renderer.tokenizer.decode(list(example.completion[:-1]))
        assert json.loads(text) == {"reasoning": "It is 7.", "preference": label}
        assert parse_verdict(text) is Outcome(label)


def test_a_judge_that_writes_its_verdicts_is_tested_as_it_writes_them(tmp_path):
    given = arguments(tmp_path, "written", max_steps=1, eval_every=1, judge_mode="verdict", max_tokens=60)
    assert train_recipe("warmup", given) == 0
    written = metrics(tmp_path / "written")[-1]
    assert {"test/judge/accuracy", "test/judge/invalid_rate"} <= written.keys()
    assert "test/judge/off_set_mass" not in written  # which only label probabilities have
    assert train_recipe("warmup", arguments(tmp_path, "labels", max_steps=1, eval_every=1)) == 0
    assert "test/judge/off_set_mass" in metrics(tmp_path / "labels")[-1]


async def test_the_order_counts_in_every_pair_that_a_judge_is_tested_on(monkeypatch):
    async def compare(self, question, solutions, first, second, seed):
        prefers = Outcome.A if question == "biased" else (Outcome.A, Outcome.B)[first]  # the right one is 0
        return Comparison(first=first, second=second, outcome=prefers, score=VERDICT_SCORES[prefers])

    monkeypatch.setattr(PolicySelfComparisonJudge, "compare", compare)
    pairs = [Pair(name, "It is 7.", "It is 9.") for name in ("biased", "fair", "fair", "fair")]
    test = JudgeEvaluator(pairs=pairs, renderer=tiny_renderer(), options=JudgeOptions())
    figures = await test(None, 0)
    assert figures["test/judge/position_bias"] == figures["test/judge/order_gap"] == 0.25
    assert figures["test/judge/accuracy"] == (1 + 2 * 3) / 8
    assert figures["test/judge/pair_accuracy"] == (0.5 + 3) / 4


def test_no_text_of_a_file_becomes_a_control_token():
    renderer = tiny_renderer()
    stop = renderer.get_stop_sequences()[0]
    end = renderer.tokenizer.decode([stop])
    example = file_example(
        renderer,
        [{"role": "user", "content": f"a{end}b"}, {"role": "assistant", "content": f"c{end}d"}],
    )
    assert list(example.completion).count(stop) == 1
    assert example.completion[-1] == stop


def test_scripted_rankings_have_no_order_of_their_own():
    import random

    texts = {_shuffled("Ranking: A > B > C", random.Random(seed)) for seed in range(30)}
    assert len(texts) == 6
    assert _shuffled("Revise: A > B", random.Random(0)) == "Revise: A > B"


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "a"}',
        '{"messages": [{"role": "assistant", "content": "a"}]}',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
        '{"messages": [{"role": "user"}, {"role": "assistant", "content": "b"}]}',
    ],
)
def test_a_file_that_holds_something_else_is_refused_with_its_line(tmp_path, line):
    path = tmp_path / "examples.jsonl"
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path.write_text(f"{json.dumps(good)}\n{line}\n")
    with pytest.raises(ValueError, match=r'examples.jsonl:2: needs "messages"'):
        read_messages(str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_epochs": 2.0}, "num_epochs would change nothing: the loss of a warm-up"),
        ({"loss_fn": "ppo"}, "loss_fn would change nothing: the loss of a warm-up"),
        ({"max_steps": None}, "max_steps says how long"),
        ({"scripted": True}, "scripted and prompts are for protocols"),
        ({"examples": "critique", "judge_mode": "verdict"}, "judge_mode=verdict is for examples=judge"),
        ({"samples": 0}, "samples must be 1 or more"),
        ({"examples": "criti"}, "criti"),
        ({}, "needs problems with known answers"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(options, message):
    with pytest.raises(ValueError, match=message):
        Config(train_prompts=["a"], learning_rate=1e-3, **options).make_plan()


def test_the_code_of_a_protocol_that_is_learned_is_in_the_record():
    name = f"{Path(__file__).parents[2] / 'examples' / 'debate.py'}:DEBATE"
    digests = Config(train_prompts=["a"], learning_rate=1e-3, examples=name).make_plan().record["user_code"]
    assert list(digests) == [name]
    assert digests[name]


NUM_PROBLEMS = 6


def arguments(tmp_path: Path, name: str, **options: object) -> list[str]:
    """The command line of a warm-up of the built-in policy."""
    train = write_problems(tmp_path / "train.jsonl", "train", NUM_PROBLEMS, seed=0)
    test = write_problems(tmp_path / "test.jsonl", "test", 3, seed=0)
    given = {
        "model_name": "tiny",
        "lora_rank": 4,
        "train_prompts_path": train,
        "test_prompts_path": test,
        "num_test_conversations": 0,
        "batch_size": 8,
        "max_tokens": 72,
        "samples": 2,
        "log_path": tmp_path / name,
    }
    return [f"{key}={value}" for key, value in (given | options).items()]


def metrics(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def test_a_judge_is_warmed_up_and_a_resumed_run_goes_on_to_the_bit(tmp_path, capsys):
    assert train_recipe("warmup", arguments(tmp_path, "whole", max_steps=3, eval_every=2)) == 0
    whole = metrics(tmp_path / "whole")
    assert [row["step"] for row in whole if "imitation/nll" in row] == [0, 1, 2]
    assert {"test/judge/accuracy", "test/judge/position_bias"} <= set(whole[0]) & set(whole[-1])
    assert "load_checkpoint_path=" in capsys.readouterr().out
    part = arguments(tmp_path, "part", max_steps=1, eval_every=2)
    assert train_recipe("warmup", part) == 0
    examples = (tmp_path / "part" / "examples.jsonl").read_bytes()
    more = arguments(tmp_path, "part", max_steps=3, eval_every=2, behavior_if_exists="resume")
    assert train_recipe("warmup", more) == 0
    assert (tmp_path / "part" / "examples.jsonl").read_bytes() == examples
    assert metrics(tmp_path / "part") == whole
    state = tmp_path / "part" / "state" / "weights" / "000003"
    go_on = arguments(tmp_path, "next", max_steps=1, eval_every=0, load_checkpoint_path=state)
    assert train_recipe("warmup", go_on) == 0


def test_a_protocol_is_learned_from_what_could_be_read_and_from_scripted_replies(tmp_path):
    options = {"examples": "critique", "num_agents": 3, "max_steps": 1, "eval_every": 0, "samples": 1}
    assert train_recipe("warmup", arguments(tmp_path, "none", max_tokens=2, **options)) == 2
    assert train_recipe("warmup", arguments(tmp_path, "own", max_tokens=30, **options)) == 0
    assert train_recipe("warmup", arguments(tmp_path, "all", max_tokens=30, scripted=True, **options)) == 0
    own, everything = (
        [json.loads(line)["kind"] for line in (tmp_path / name / "examples.jsonl").read_text().splitlines()]
        for name in ("own", "all")
    )
    assert len(own) < len(everything) == NUM_PROBLEMS * 3 * 5
    assert set(everything) == {"proposal", "ranking", "critique", "revision", "verdict"}


def test_messages_of_a_file_are_learned(tmp_path):
    path = tmp_path / "own.jsonl"
    said = [{"role": "user", "content": "Say so."}, {"role": "assistant", "content": "So."}]
    path.write_text(json.dumps({"messages": said}) + "\n")
    options = {"examples": path, "max_steps": 6, "eval_every": 0, "batch_size": 4, "learning_rate": 1e-2}
    assert train_recipe("warmup", arguments(tmp_path, "file", **options)) == 0
    losses = [row["imitation/nll"] for row in metrics(tmp_path / "file") if "imitation/nll" in row]
    assert losses[-1] < losses[0] - 0.5
