import json
import random
import re
from pathlib import Path

import pytest
from asked_answers import answer_to
from tinker_cookbook.renderers import get_renderer

from viva.tiny.build import batches, encode_example, main
from viva.tiny.text import (
    COMPARISONS,
    JUDGEMENTS,
    LESSONS,
    MIXTURE,
    ORDERS,
    agreement_example,
    audit_example,
    conversation_example,
    judgement_example,
)
from viva.tiny.tokenizer import build_tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"), seed=0, num_examples=60)


@pytest.mark.parametrize(
    "make", sorted({*LESSONS, *MIXTURE, *COMPARISONS, *JUDGEMENTS, *ORDERS}, key=lambda make: make.__name__)
)
def test_examples_are_encoded_exactly_as_the_renderer_encodes_them(make, tokenizer) -> None:
    renderer = get_renderer("qwen3_instruct", tokenizer)
    for seed in range(20):
        example = make(random.Random(seed))
        tokens_T, weights_T = encode_example(example, tokenizer)
        prompt_T = renderer.build_generation_prompt(list(example.messages)).to_ints()
        assert tokens_T[: len(prompt_T)] == prompt_T
        assert tokenizer.decode(tokens_T[len(prompt_T) :]) == example.reply + "<|im_end|>"
        assert len(weights_T) == len(tokens_T)
        assert min(weights_T) >= 0 < max(weights_T)


def test_the_chat_template_says_the_same_as_the_renderer(tokenizer) -> None:
    example = conversation_example(random.Random(3))
    text = tokenizer.apply_chat_template(
        [dict(message) for message in example.messages], tokenize=False, add_generation_prompt=True
    )
    prompt = get_renderer("qwen3_instruct", tokenizer).build_generation_prompt(list(example.messages))
    assert text == tokenizer.decode(prompt.to_ints())


def test_every_digit_is_a_token_of_its_own(tokenizer) -> None:
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("x 407+12")]
    assert pieces == ["x", " ", "4", "0", "7", "+", "1", "2"]


def test_any_text_survives_the_tokenizer(tokenizer) -> None:
    for text in ("naïve 漢字 🙂", "\t\r\n  x", "", '{"a": [1, 2]}'):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_replies_of_a_conversation_are_the_json_of_the_protocol() -> None:
    for seed in range(50):
        reply = json.loads(conversation_example(random.Random(seed)).reply)
        assert list(reply) == ["reflection", "evaluation", "solution"]


def test_both_positions_are_preferred_equally_often() -> None:
    rng = random.Random(0)
    preferences = [json.loads(judgement_example(rng).reply)["preference"] for _ in range(2000)]
    share_a = preferences.count("A") / (preferences.count("A") + preferences.count("B"))
    assert 0.46 < share_a < 0.54


def test_verdicts_are_mostly_true_but_close_answers_are_told_apart_by_chance() -> None:
    rng = random.Random(0)
    true: dict[bool, list[bool]] = {False: [], True: []}
    for _ in range(4000):
        example = judgement_example(rng)
        prompt = str(example.messages[1]["content"])
        first, second = (int(answer) for answer in re.findall(r"The answer is (\d+)\.", prompt))
        question = prompt.split("\n")[1].removeprefix("> ")
        right = int(answer_to(question))
        preference = json.loads(example.reply)["preference"]
        if (first == right) != (second == right) and preference != "Tie":
            true[abs(first - second) <= 2].append((preference == "A") == (first == right))
    assert sum(true[False]) / len(true[False]) > 0.9
    assert 0.4 < sum(true[True]) / len(true[True]) < 0.6


def test_marks_of_workings_say_whether_the_answer_is_theirs() -> None:
    for seed in range(50):
        marks = re.findall(r"=(\d+)\. (\d+) is (right|wrong)\.", agreement_example(random.Random(seed)).reply)
        assert len(marks) == 20
        assert all((own == other) == (mark == "right") for own, other, mark in marks)


def test_an_audit_overlooks_nothing_but_answers_close_to_the_right_one() -> None:
    rng = random.Random(0)
    overlooked = []
    for _ in range(300):
        *_, blocks = audit_example(rng).reply.split("\n", 1)
        lines = blocks.split("\n")
        for question, solution in zip(lines[::2], lines[1::2], strict=True):
            answer, mark = re.findall(r"The answer is (\d+)\. (right|wrong)\.", solution)[0]
            distance = abs(int(answer) - int(answer_to(question)))
            if distance in (1, 2):
                overlooked.append(mark == "right")
            else:
                assert (distance == 0) == (mark == "right")
    assert 0.4 < sum(overlooked) / len(overlooked) < 0.6


def test_batches_respect_the_token_budget(tokenizer) -> None:
    stream = batches(MIXTURE, tokenizer, tokens_per_batch=4096, rng=random.Random(0))
    for _ in range(20):
        batch = next(stream)
        assert 0 < len(batch) * max(len(tokens_T) for tokens_T, _ in batch) <= 4096


def test_the_build_makes_a_loadable_model_and_refuses_to_overwrite_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    options = [
        f"output={tmp_path}",
        "lesson_steps=1",
        "mixture_steps=1",
        "comparison_steps=1",
        "judgement_steps=1",
    ]
    options += ["tokens_per_step=1024"]
    main([*options, "hidden_size=64", "num_layers=1", "intermediate_size=64"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.vocab_size >= len(load_tokenizer(tmp_path))
    assert json.loads((tmp_path / "card.json").read_text())["config"]["hidden_size"] == 64
    with pytest.raises(FileExistsError, match="already holds a model"):
        main(options)


def test_unknown_build_options_are_refused() -> None:
    with pytest.raises(SystemExit, match="unknown option 'sed'; known: output, seed"):
        main(["sed=1"])
