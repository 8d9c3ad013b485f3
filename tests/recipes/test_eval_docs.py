"""docs/eval.md says what the code does: its options, figures and files are read and tried here."""

import dataclasses
import re

import chz
from pages import blocks, codes, page, tables

import viva.eval.records as records
from viva.eval.figures import conversation_figures, direct_figures
from viva.eval.judged import JudgedPair, figures_of_judges
from viva.eval.records import COMPARISON_FORMAT, FORMAT
from viva.judging.answers import CHECKS
from viva.judging.comparison import Comparison, Outcome
from viva.recipes.evaluation import KINDS, EvalOptions

PAGE = page("eval.md")


def test_every_option_is_documented_once_with_its_default() -> None:
    rows = [row for table in tables(PAGE, "option") for row in table]
    assert sorted(codes(row[0])[0] for row in rows) == sorted(chz.asdict(EvalOptions()))
    for row in rows:
        assert codes(row[1])[0] == str(getattr(EvalOptions(), codes(row[0])[0])), row[0]


def test_every_figure_is_documented() -> None:
    answer = dataclasses.replace(records.WRONG, right=True)
    agents = (records.AgentAnswers(first=answer, final=answer, score=0.5),) * 4
    talk = records.PlayedProblem(
        question="q", answer="a", agents=agents, num_tokens=9, num_judge_tokens=1, direct=(answer,)
    )
    asked = records.Asked(question="q", answer="a", answers=(answer,) * 4)
    names = [*direct_figures([asked], [asked]), *conversation_figures([talk])]
    generic = {re.sub(r"@\d+", "@k", name).replace("avg@k", "avg@n") for name in names}
    documented = [name for table in tables(PAGE, "figure") for row in table for name in codes(row[0])]
    assert sorted(documented) == sorted(generic)


def test_every_figure_of_a_judge_is_documented() -> None:
    said = Comparison(first=0, second=1, outcome=Outcome.A, score=-1.0, probabilities=(1.0, 0.0, 0.0))
    pair = JudgedPair(question="q", known="a", answers=(records.WRONG,) * 2, comparisons=(said,))
    found = figures_of_judges({"x": [[pair]], "y": [[pair]]}, resamples=2, seed=0)
    names = {re.sub(r"^judges?/[^/]+/", "", name) for name in found}
    documented = [name for table in tables(PAGE, "judged") for row in table for name in codes(row[0])]
    assert sorted(documented) == sorted(names)


def test_kinds_and_graders_are_named() -> None:
    rows = {row[0]: row for table in tables(PAGE, "`grader`") for row in table}
    assert [codes(name)[0] for name in rows][:3] == list(CHECKS)
    (kinds,) = (row[2] for table in tables(PAGE, "option") for row in table if row[0] == "`kinds`")
    assert all(f"`{kind}`" in kinds for kind in KINDS)


def test_the_keys_of_the_files_are_those_of_the_records() -> None:
    written = PAGE.partition("## What it writes")[2].partition("## Evaluators")[0]
    named = set(codes(written))
    assert {FORMAT, COMPARISON_FORMAT} <= named
    for record in (
        "Answer",
        "Asked",
        "AgentAnswers",
        "PlayedProblem",
        "Figure",
        "Difference",
        "Evaluation",
        "TokenCost",
    ):
        names = {field.name for field in dataclasses.fields(getattr(records, record))}
        assert names <= named, record


def test_the_example_imports_what_there_is() -> None:
    (code,) = blocks(PAGE, "python")
    for line in re.findall(r"^from viva\S* import \w+$", code, re.M):
        exec(line, {})
