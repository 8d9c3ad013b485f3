import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing import seconds

from viva.judging.comparison import LABELS, Outcome
from viva.judging.judge import parse_verdict

prose = st.text(alphabet=st.characters(exclude_characters="{}<>`", exclude_categories=["Cs"]), max_size=60)
labels = st.sampled_from(LABELS)


@given(reasoning=st.text(), label=labels, first=st.booleans())
def test_the_asked_json_is_read(reasoning: str, label: str, first: bool) -> None:
    fields = {"reasoning": reasoning, "preference": label}
    text = json.dumps(fields if first else dict(reversed(fields.items())))
    assert parse_verdict(text) is Outcome(label)


@pytest.mark.parametrize(
    "template",
    [
        '{{"preference": "{}"}}',
        '```json\n{{"preference": "{}"}}\n```',
        '```\n{{"preference": "{}"}}\n```',
        'I thought. {{"reasoning": "so", "preference": "{}"}} Done.',
        "Well. <preference>{}</preference>",
        "<preference> {} </preference>",
        "{}",
        ' "{}". ',
        "**{}**",
        '{{"preference": "Solution {}"}}',
        '{{"preference": "{}", "reasoning": {{"deep": []}}}}',
    ],
)
@pytest.mark.parametrize("label", LABELS)
def test_every_marked_verdict_is_read(template: str, label: str) -> None:
    if label == "Tie" and "Solution" in template:
        return
    for spelling in (label, label.upper(), label.lower()):
        assert parse_verdict(template.format(spelling)) is Outcome(label)


# Regression: substring fallbacks (DESIGN, trap 8)


@pytest.mark.parametrize(
    "text",
    [
        "Solution A is worse; Solution B is better",
        "B is much better than A",
        "A is better.",
        "Preference: B",
        "The winner is A",
        "A or B",
        "AB",
        "It is a tie",
        "",
        "   ",
        "I prefer **A**",
        '"preference": "A"',
        '{"preference": "A"',
        '{"verdict": "A"}',
        '{"reasoning": "A is better"}',
        '{"reasoning": "{\\"preference\\": \\"A\\"}"}',
        '{"preference": "neither"}',
        '{"preference": "A > B"}',
        '{"preference": ["A"]}',
        '{"preference": {"winner": "A"}}',
        "<preference>A",
        "<preference>A<b></preference>",
    ],
)
def test_what_is_not_marked_as_the_verdict_is_invalid(text: str) -> None:
    assert parse_verdict(text) is Outcome.INVALID


@given(
    text=prose.filter(
        lambda text: (
            text.strip().strip("\"'`*.").strip().lower() not in ("a", "b", "tie", "solution a", "solution b")
        )
    )
)
def test_prose_never_names_a_winner(text: str) -> None:
    assert parse_verdict(text) is Outcome.INVALID


@pytest.mark.parametrize(
    "text",
    [
        'First {"preference": "A"}, no: {"preference": "B"}',
        '```json\n{"preference": "A"}\n```\n```json\n{"preference": "Tie"}\n```',
        "<preference>A</preference> <preference>B</preference>",
        '{"preference": "A"} {"preference": "perhaps"}',
    ],
)
def test_two_verdicts_that_disagree_are_none(text: str) -> None:
    assert parse_verdict(text) is Outcome.INVALID
    assert parse_verdict(text.replace("B", "A").replace("Tie", "A").replace("perhaps", "A")) is Outcome.A


@given(
    text=st.lists(
        st.sampled_from(
            ['{"preference":', '"A"', "}", "{", "<preference>", "A", "</preference>", "`" * 3, " "]
        )
    ).map("".join)
)
def test_any_text_gives_an_outcome(text: str) -> None:
    assert parse_verdict(text) in Outcome


@pytest.mark.parametrize(
    "unit", ['{"preference":', "<preference>", '{"preference": "A"} ', '```{"preference": "B"}\n', "A "]
)
def test_time_grows_with_the_length_and_no_faster(unit: str) -> None:
    texts = [(unit * (size // len(unit) + 1))[:size] for size in (16_000, 64_000)]
    small, large = (seconds(parse_verdict, text) for text in texts)
    assert large < 10 * small + 0.01
