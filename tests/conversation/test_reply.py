import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timing import seconds

from viva.conversation.records import AgentResponse, ReplyStatus
from viva.conversation.replies import parse_reply, tagged_fields

FIELDS = ("reflection", "evaluation", "solution")
OK, REPAIRED, UNSTRUCTURED = ReplyStatus.OK, ReplyStatus.REPAIRED, ReplyStatus.UNSTRUCTURED

texts = st.text(max_size=40)
solutions = texts.filter(str.strip)
pieces = st.sampled_from(
    [
        *(
            "{",
            "}",
            "[",
            "]",
            '"',
            ":",
            ",",
            "\\",
            "\n",
            " ",
            "```",
            "```json\n",
            "null",
            "1e3",
            "\\u",
            "\\ud83d",
        ),
        *(
            '{"solution": "x"}',
            '"solution"',
            "<solution>",
            "</solution>",
            "<reflection>",
            "a",
            "é",
            "\u2028",
            "\x00",
        ),
        *('{"a":', '{"solution":', '"\\"', "<|im_end|>", "<think>", "-0.5", "true", '{"SOLUTION ":"y",}'),
    ]
)
hostile = st.lists(pieces, max_size=60).map("".join)


def reply_of(reflection: str, evaluation: str, solution: str) -> str:
    return json.dumps({"reflection": reflection, "evaluation": evaluation, "solution": solution})


# the five strategies, in order


@given(
    reflection=texts,
    evaluation=texts,
    solution=solutions,
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
def test_a_json_object_with_the_asked_fields_reads_as_it_was_written(
    reflection: str, evaluation: str, solution: str, ascii_only: bool, indent: int | None
) -> None:
    fields = {"reflection": reflection, "evaluation": evaluation, "solution": solution}
    parsed = parse_reply("\n " + json.dumps(fields, ensure_ascii=ascii_only, indent=indent) + "\n")
    assert parsed.response == AgentResponse(**fields)
    assert (parsed.status, parsed.strategy) == (OK, "json")


@pytest.mark.parametrize(
    ("template", "strategy"),
    [
        ("{}", "json"),
        ("```json\n{}\n```", "json_fence"),
        ("Here it is:\n```JSON\n{}\n```\nDone.", "json_fence"),
        ("```\n{}\n```", "fence"),
        ("```python\n{}", "fence"),
        ("Sure! {} I hope this helps.", "embedded"),
        ('{{"reply": {}}}', "embedded"),
    ],
)
@pytest.mark.parametrize(
    "solution", ["42", "use ```json\nx\n``` and }{", 'if x {\n  y("}")\n}\n', "<solution>z</solution>"]
)
def test_the_object_is_found_wherever_it_stands(template: str, strategy: str, solution: str) -> None:
    parsed = parse_reply(template.format(reply_of("r", "e", solution)))
    assert parsed.response == AgentResponse(reflection="r", evaluation="e", solution=solution)
    assert parsed.strategy == strategy
    assert parsed.status is (OK if strategy == "json" else REPAIRED)


def test_fields_in_tags_are_read() -> None:
    parsed = parse_reply(
        "Well.\n<Reflection>r</Reflection>\n<evaluation>\ne\n</evaluation><solution> 4\n2 </solution>!"
    )
    assert parsed.response == AgentResponse(reflection="r", evaluation="e", solution="4\n2")
    assert (parsed.status, parsed.strategy) == (REPAIRED, "xml")


@pytest.mark.parametrize(
    "template",
    [
        "<reflection>I write <solution>13</solution> first.</reflection>{}",
        "<reflection>It goes into <solution>.</reflection>{}",
        "<reflection>End with </solution>.</reflection>{}",
        "<evaluation>Agent 1 said <reflection>r</reflection><solution>13</solution>.</evaluation>{}",
        "<reflection>Never closed. {}",
        "{}<evaluation>Not <solution>13</solution></evaluation>",
        "{}<solution>13</solution>",
    ],
)
def test_a_tag_inside_another_field_is_its_text(template: str) -> None:
    parsed = parse_reply(template.format("<solution>4 <b>2</b></solution>"))
    assert parsed.response.solution == "4 <b>2</b>"
    assert (parsed.status, parsed.strategy) == (REPAIRED, "xml")


def test_a_solution_in_tags_may_hold_tags_of_its_own_name() -> None:
    nested = "<solution>write <solution>42</solution> like this</solution>"
    assert parse_reply(nested).response.solution == "write <solution>42</solution> like this"


def test_a_solution_that_stands_in_another_field_alone_is_none() -> None:
    text = "<reflection>not <solution>13</solution></reflection>"
    assert parse_reply(text).status is UNSTRUCTURED


names = st.sampled_from(("reflection", "evaluation", "solution"))
fields = st.recursive(
    st.text(alphabet="ab ", max_size=3),
    lambda inner: st.lists(st.tuples(names, inner), max_size=3).map(
        lambda parts: "".join(f"<{name}>{text}</{name}>" for name, text in parts)
    ),
    max_leaves=12,
)


@given(st.lists(st.tuples(names, fields), max_size=5))
def test_of_well_formed_tags_the_top_level_is_read(parts: list[tuple[str, str]]) -> None:
    text = "".join(f"<{name}>{inner}</{name}>" for name, inner in parts)
    first = {name: inner.strip() for name, inner in reversed(parts)}
    found, begin = tagged_fields(text, ("reflection", "evaluation", "solution"))
    assert (found, begin) == (first, 0 if parts else len(text))


@given(
    text=st.text(alphabet=st.characters(exclude_characters="{}<>", exclude_categories=["Cs"]), max_size=80)
)
def test_text_without_structure_is_the_solution(text: str) -> None:
    parsed = parse_reply(text)
    assert parsed.response == AgentResponse(solution=text.strip())
    assert (parsed.status, parsed.strategy) == (UNSTRUCTURED, "text")


def test_a_json_fence_goes_before_a_plain_one_and_a_plain_one_before_loose_text() -> None:
    loose, plain, marked = (reply_of("", "", name) for name in ("loose", "plain", "marked"))
    assert parse_reply(f"{loose}\n```\n{plain}\n```\n```json\n{marked}\n```").response.solution == "marked"
    assert parse_reply(f"{loose}\n```\n{plain}\n```").response.solution == "plain"


def test_of_tags_and_a_loose_object_what_begins_first_holds_the_other() -> None:
    assert parse_reply('<solution>answer {"solution": "json"}</solution>').strategy == "xml"
    assert (
        parse_reply('Here: {"solution": "<solution>tag</solution>"}').response.solution
        == "<solution>tag</solution>"
    )


# what is odd in an object


@pytest.mark.parametrize(
    ("text", "solution"),
    [
        ('{"solution": "42"}', "42"),
        ('{"reflection": null, "evaluation": "e", "solution": "42"}', "42"),
        ('{"reflection": {"deep": [1]}, "evaluation": "e", "solution": "42"}', "42"),
        ('{"reflection": "r", "evaluation": "e", "solution": "41", "solution": "42"}', "42"),
        ('{"reflection": "r", "evaluation": "e", "solution": "42",}', "42"),
        ('{"Reflection": "r", " evaluation": "e", "SOLUTION": "42"}', "42"),
        ('{"reflection": "r", "evaluation": "e", "solution": "4\n2"}', "4\n2"),
        (
            '{"reflection": "r", "evaluation": "e", "solution": "\\(x\\) \\sqrt 2 \\u12"}',
            "\\(x\\) \\sqrt 2 \\u12",
        ),
        ('{"reflection": "r", "evaluation": "e", "solution": "\\ud83d"}', "\ufffd"),
    ],
)
def test_a_bent_object_is_read_but_not_ok(text: str, solution: str) -> None:
    parsed = parse_reply(text)
    assert parsed.response.solution == solution
    expected = OK if solution == "\ufffd" else REPAIRED
    assert (parsed.status, parsed.strategy) == (expected, "json")


@pytest.mark.parametrize(
    ("number", "text"), [("42", "42"), ("-1.50", "-1.50"), ("1e3", "1e3"), ("9" * 5000, "9" * 5000)]
)
def test_numbers_are_taken_as_they_were_written(number: str, text: str) -> None:
    parsed = parse_reply('{"reflection": "", "evaluation": "", "solution": ' + number + "}")
    assert parsed.response.solution == text
    assert parsed.status is OK


@pytest.mark.parametrize(
    "value", ['"x", "solution": null', "null", "true", '""', '"  \\n"', "[1, 2]", '{"a": "b"}', "[]", "{}"]
)
def test_an_object_without_a_solution_is_no_reply(value: str) -> None:
    text = '{"reflection": "r", "evaluation": "e", "solution": ' + value + "}"
    parsed = parse_reply(text)
    assert (parsed.response, parsed.status) == (AgentResponse(solution=text), UNSTRUCTURED)


def test_extra_fields_are_ignored_however_deep() -> None:
    depth = 100_000
    junk = "[" * depth + "]" * depth
    parsed = parse_reply('{"extra": ' + junk + ', "reflection": "r", "evaluation": "e", "solution": "s"}')
    assert parsed.response == AgentResponse(reflection="r", evaluation="e", solution="s")
    assert parsed.status is OK


@pytest.mark.parametrize("opening", ['{"a":', "[", '{"a":['])
def test_endless_nesting_is_text(opening: str) -> None:
    assert parse_reply('{"solution": "s", "x": ' + opening * 50_000).status is UNSTRUCTURED


def test_a_stray_brace_or_quote_hides_no_object() -> None:
    assert parse_reply('A set {"a" and then {"solution": "x"}').response.solution == "x"
    assert parse_reply('{"never ended\n {"solution": "x"} "').response.solution == "x"
    assert parse_reply('5" wide }{ {"solution": "x"}').response.solution == "x"


def test_a_flood_of_broken_objects_is_not_searched_to_its_end() -> None:
    assert parse_reply('{"a": 1, x ' * 100 + '{"solution": "s"}').response.solution == "s"
    assert parse_reply('{"a": 1, x ' * 2000 + '{"solution": "s"}').status is UNSTRUCTURED


# Regression: a stop string that ends a reply at a line break and a brace (DESIGN, trap 7)


@pytest.mark.parametrize(
    "code", ["def f():\n    return {\n}\nprint(f())", '{\n  "solution": {"x": 1\n}\n}', "a\n}"]
)
def test_code_and_nested_json_inside_a_solution_survive(code: str) -> None:
    parsed = parse_reply(reply_of("r", "e", code))
    assert (parsed.response.solution, parsed.status) == (code, OK)


# fuzz: never raises, and what it returns can be stored


@settings(max_examples=400)
@given(text=st.one_of(hostile, st.text(alphabet=st.characters(), max_size=200)))
def test_any_text_gives_a_reply_that_can_be_encoded(text: str) -> None:
    parsed = parse_reply(text)
    for name in FIELDS:
        getattr(parsed.response, name).encode()
    assert parsed.response.solution.strip() or not text.strip()
    assert parse_reply(text) == parsed


@given(reflection=texts, evaluation=texts, solution=solutions, cut=st.floats(0, 1), head=hostile)
def test_a_truncated_object_is_never_half_read(
    reflection: str, evaluation: str, solution: str, cut: float, head: str
) -> None:
    whole = reply_of(reflection, evaluation, solution)
    text = whole[: int(cut * len(whole))]
    parsed = parse_reply(text)
    assert parsed.status is (UNSTRUCTURED if len(text) < len(whole) else OK)
    parse_reply(head + text)


@given(before=texts, after=texts, solution=solutions)
def test_text_around_an_object_does_not_change_what_it_says(before: str, after: str, solution: str) -> None:
    before, after = (text.translate(dict.fromkeys(map(ord, "{}[]<>`"), "-")) for text in (before, after))
    assert parse_reply(f"{before} {reply_of('r', 'e', solution)} {after}").response.solution == solution


# time: linear in the length, whatever the text


@pytest.mark.parametrize(
    "unit",
    [
        *('{"a":', '{"a":"', '{"a":1,', '{"a":{},', '{"', "{", "[", '"', '{"\\"', '{"\\x', "\\", " ", "{ "),
        *("```json ", "```json{", '```{"a":[', "```", "<solution>", "</solution>", "<solution></evaluation>"),
        *('```json{"```json{":{', 'x"{"a":"b{', '{"solution":"","a":', '{"solution":"\\(', "{}", "\n```\n{"),
        *('"{",":",', '{"a":["{",":",', '"{",":",",",":",', '{"a":"\\{', '{"a":"}","b":"{"', '{"{":"{","}":'),
    ],
)
def test_time_grows_with_the_length_and_no_faster(unit: str) -> None:
    texts = [(unit * (size // len(unit) + 1))[:size] for size in (16_000, 64_000)]
    small, large = (seconds(parse_reply, text) for text in texts)
    assert large < 10 * small + 0.01
    assert large < 0.5


def test_a_megabyte_is_read_at_once() -> None:
    start = time.process_time()
    long = 'He said: "{no}"\n\t\\ ' * 50_000
    parsed = parse_reply(reply_of("r", "e", long))
    assert (parsed.response.solution, parsed.status) == (long, OK)
    assert parse_reply(long).status is UNSTRUCTURED
    assert time.process_time() - start < 3
