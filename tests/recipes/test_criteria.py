"""Criteria as an option: on the line or in a file, and the same in every command that takes them."""

import pytest

from viva.judging.rubric import criteria_of
from viva.recipes.config import make_options, parse_options
from viva.recipes.evaluation import EvalOptions, ScreenOptions
from viva.recipes.math_efficiency import Config
from viva.recipes.reward import read_criteria

WANTED = {"is polite": 1.0, "is short": 2.0}
FORMS = [
    "- is polite\n- text: is short\n  weight: 2\n",
    '["is polite", {"text": "is short", "weight": 2.0}]',
    '{"is polite": 1, "is short": 2}',
]


@pytest.mark.parametrize("text", FORMS)
def test_a_file_and_the_line_hold_the_same(tmp_path, text):
    path = tmp_path / "criteria.yaml"
    path.write_text(text)
    assert read_criteria(str(path)) == WANTED
    if text.startswith(("[", "{")):
        assert read_criteria(text) == WANTED


@pytest.mark.parametrize("options", [Config, EvalOptions, ScreenOptions])
def test_every_command_takes_them(tmp_path, options):
    path = tmp_path / "criteria.yaml"
    path.write_text(FORMS[0])
    more = [f"log_path={tmp_path}"] if options is Config else []
    for given in (str(path), FORMS[2]):
        assert parse_options(options, [f"criteria={given}", *more]).criteria == WANTED
    (tmp_path / "run.yaml").write_text(f"criteria: {FORMS[1]}")
    assert parse_options(options, [f"config={tmp_path}/run.yaml", *more]).criteria == WANTED
    own = dict(each.split("=") for each in more)
    for given in (WANTED, ["is polite", {"text": "is short", "weight": 2}], str(path)):
        assert make_options(options, own | {"criteria": given}).criteria == WANTED
    assert make_options(options, own | {"criteria": None}).criteria is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be one or more that differ"),
        ("3", "must be one or more that differ"),
        ("- [x", "cannot be read"),
        ("- x\n- 3", "criterion 2 needs a text, and a number as weight or none; got 3"),
        ("- x\n- 'x '", "holds the criterion 'x' twice"),
        ("{x: much}", "criterion 1 needs a text, and a number as weight or none; got 'x' and 'much'"),
        ("- {text: x, wieght: 2}", "unknown field 'wieght'; allowed: text, weight"),
    ],
)
def test_a_mistake_is_told_with_its_file(tmp_path, capsys, text, message):
    path = tmp_path / "criteria.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_criteria(str(path))
    with pytest.raises(ValueError, match=r"gone.yaml cannot be read"):
        read_criteria(str(tmp_path / "gone.yaml"))
    with pytest.raises(SystemExit):
        parse_options(EvalOptions, [f"criteria={path}"])
    told = capsys.readouterr().err
    assert f"criteria={path}" in told
    assert message in told


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "one or more that differ"),
        ("is short", "one or more that differ"),
        (["x", "x "], "one or more that differ"),
        ([""], "a criterion needs a text"),
        ({"x": 0}, "needs a weight above 0"),
        ({"x": float("nan")}, "needs a weight above 0"),
    ],
)
def test_what_are_no_criteria_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        criteria_of(given)
