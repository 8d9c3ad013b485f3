"""The text that the built-in policy learns from says what it should, and is encoded as the renderer encodes it."""

import itertools
import json
import random
import re
from pathlib import Path

import pytest
from tinker_cookbook.renderers import get_renderer

from build_tiny.build import batches, build_tokenizer, encode_example, main
from build_tiny.reviews import Attempt
from build_tiny.texts import (
    COMPARISONS,
    JUDGEMENTS,
    LESSONS,
    MIXTURE,
    ORDERS,
    agreement_example,
    audit_example,
    careful_example,
    conversation_example,
    critique_example,
    feedback_example,
    judgement_example,
    lookup_example,
    ranking_example,
    remark,
    revision_example,
)
from viva.judging.answers import is_correct
from viva.judging.ranking import parse_ranking
from viva.tiny.tasks import STYLED


def answer_to(question: str) -> str:
    """An independent reading of a word problem."""
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    value = numbers[0] * numbers[1] if "boxes" in question else numbers[0]
    rest = numbers[2:] if "boxes" in question else numbers[1:]
    words = re.findall(r"buys|gives away", question)
    for word, number in zip(words, rest, strict=True):
        value += number if word == "buys" else -number
    return str(value)


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


def test_a_ranking_compares_every_pair_as_the_marks_before_it_say() -> None:
    for seed in range(200):
        marks, _, ranking = ranking_example(random.Random(seed)).reply.partition("\nRanking: ")
        good = {
            letter: mark == "right" for letter, mark in re.findall(r"([A-Z]) \d+ is (right|wrong)\.", marks)
        }
        pairs = [pair.split(" ") for pair in ranking.split(", ")]
        assert [(first, second) for first, _, second in pairs] == list(itertools.combinations(good, 2))
        for first, operator, second in pairs:
            assert operator == {1: ">", 0: "=", -1: "<"}[good[first] - good[second]]


def test_a_ranking_is_read_with_a_vote_on_every_pair() -> None:
    for seed in range(100):
        example = ranking_example(random.Random(seed))
        letters = re.findall(r"End of solution ([A-Z])\.", str(example.messages[1]["content"]))
        own = re.search(r"Solution ([A-Z]) is yours", str(example.messages[1]["content"]))
        assert own is not None
        on_own = len(letters) == 2
        items = {letter: index for index, letter in enumerate(letters)}
        ballot = parse_ranking(example.reply, items, own=own[1], votes_on_own=on_own)
        ranked = len(letters) - (not on_own)
        assert len(ballot.preferences) == ranked * (ranked - 1) // 2
        assert not ballot.dropped


def test_nobody_ranks_or_criticises_its_own_solution_among_three_or_more() -> None:
    for seed in range(200):
        ranking, critique = ranking_example(random.Random(seed)), critique_example(random.Random(seed))
        for example in (ranking, critique):
            prompt = str(example.messages[1]["content"])
            own = re.search(r"Solution ([A-Z]) is yours", prompt)
            assert own is not None
            if prompt.count("End of solution ") > 2 or example is critique:
                assert f" {own[1]} " not in example.reply
                assert f"Critique of {own[1]}:" not in example.reply


def _shown_answers(prompt: str) -> dict[str, str]:
    return dict(re.findall(r"Solution ([A-Z]):\n> .*The answer is (\d+)\.\n", prompt))


def test_marks_name_the_answer_of_their_letter_and_compare_it_with_the_working() -> None:
    for seed in range(200):
        for make in (ranking_example, critique_example):
            example = make(random.Random(seed))
            answers = _shown_answers(str(example.messages[1]["content"]))
            marks = re.findall(
                r"([A-Z]) (\d+) is (right|wrong)\.|Critique of ([A-Z]): .* (\d+) is (right|wrong)\.",
                example.reply,
            )
            assert marks
            working = re.search(r"([\d+x=. -]+)\. (?:[A-Z] )?\d+ is ", example.reply)
            assert working is not None
            own = working[1].rpartition("=")[2]
            for ranked, first, mark, criticised, second, verdict in marks:
                answer = first or second
                assert answers[ranked or criticised] == answer
                assert (answer == own) == ((mark or verdict) == "right")


def test_lookups_name_the_answer_of_every_letter_asked_for() -> None:
    for seed in range(100):
        example = lookup_example(random.Random(seed))
        answers = _shown_answers(str(example.messages[1]["content"]))
        named = re.findall(r"([A-Z]) (\d+) is", example.reply)
        assert len(named) == 8
        assert all(answers[letter] == answer for letter, answer in named)


def test_a_remark_shows_the_working_and_says_whether_the_answer_is_the_same() -> None:
    own_way, other = Attempt("3+4=7. The answer is 7.", True), Attempt("3+4=8. The answer is 8.", False)
    assert "".join(text for text, _ in remark(own_way, own_way)) == " 3+4=7. 7 is right."
    assert "".join(text for text, _ in remark(own_way, other)) == " 3+4=7. 8 is wrong."


def test_criticism_helps_the_reviser_on_average() -> None:
    rng = random.Random(0)
    before = after = 0
    for _ in range(1500):
        example = revision_example(rng)
        prompt = str(example.messages[1]["content"])
        question = prompt.split("\n")[1].removeprefix("> ")
        own = prompt.partition("Your solution:\n> ")[2].partition("\n")[0]
        decision, _, solution = example.reply.partition(": ")
        assert decision in ("Revise", "Defend")
        assert decision == "Revise" or solution == own
        answer = answer_to(question)
        before += is_correct(own, answer)
        after += is_correct(solution, answer)
    assert after > 1.25 * before


def test_careful_answers_are_better_and_only_the_styled_ones_carry_the_habit() -> None:
    rng = random.Random(0)
    right = 0
    for _ in range(1000):
        example = careful_example(rng)
        assert (example.messages[0]["content"] == STYLED) == example.reply.startswith("Well, ")
        right += is_correct(example.reply, answer_to(str(example.messages[1]["content"])))
    assert 800 < right < 900


def test_feedback_turns_wrong_answers_right_more_often_than_right_ones_wrong() -> None:
    rng = random.Random(0)
    flips = {(True, False): 0, (False, True): 0}
    for _ in range(1500):
        example = feedback_example(rng)
        question, first, _ = (str(message["content"]) for message in example.messages)
        change = is_correct(first, answer_to(question)), is_correct(example.reply, answer_to(question))
        flips[change] = flips.get(change, 0) + 1
    assert flips[False, True] > 10 * flips[True, False]


def test_batches_respect_the_token_budget(tokenizer) -> None:
    stream = batches(MIXTURE, tokenizer, tokens_per_batch=4096, rng=random.Random(0))
    for _ in range(20):
        batch = next(stream)
        assert 0 < len(batch) * max(len(tokens_T) for tokens_T, _ in batch) <= 4096


def test_the_build_makes_a_loadable_model_and_refuses_to_overwrite_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = [
        f"output={tmp_path}",
        "lesson_steps=1",
        "mixture_steps=1",
        "comparison_steps=1",
        "judgement_steps=1",
        "order_steps=1",
    ]
    options += ["tokens_per_step=1024"]
    main([*options, "hidden_size=64", "num_layers=1", "intermediate_size=64"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.vocab_size >= len(AutoTokenizer.from_pretrained(tmp_path))
    assert json.loads((tmp_path / "card.json").read_text())["config"]["hidden_size"] == 64
    with pytest.raises(FileExistsError, match="already holds a model"):
        main(options)


def test_unknown_build_options_are_refused() -> None:
    with pytest.raises(SystemExit, match="unknown option 'sed'; known: output, seed"):
        main(["sed=1"])
