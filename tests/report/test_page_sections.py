"""Parts of the page that show what the viewer shows: the judge over all, evaluations, two runs, pictures, results."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from viva.cli import main
from viva.view.page import write_report

MakeRun = Callable[..., Path]
MakeLine = Callable[..., dict[str, Any]]

EVIL = "<script>alert(1)</script>\u202e"


def page(*sources: Path, output: Path | None = None) -> str:
    second = sources[1] if len(sources) > 1 else None
    return write_report(sources[0], output, second=second).read_text(encoding="utf-8")


def section(text: str, name: str) -> str:
    return re.findall(rf'<section id="{name}">.*?</section>', text, re.DOTALL)[0]


def write_result(folder: Path, name: str = "000025-a", **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    figures = {
        "direct/avg@4": {"value": 0.5625, "low": 0.4375, "high": None, "num_problems": 97},
        EVIL: {"value": None},
    }
    target = {"name": "some run", "checkpoint": "000025", "model": "tiny"}
    content = {"format": "viva evaluation 1", "target": target, "options": {"seed": 7}, "figures": figures}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content | changes))
    return path


def test_the_judge_is_summed_up_over_all_conversations_not_only_those_shown(
    make_run: MakeRun, transcript: MakeLine
) -> None:
    lines = [transcript(step, group) for step in range(4) for group in range(50)]
    shown = section(page(make_run(transcripts=lines)), "judge")
    # of every conversation: agents 0 and 1 each win when they are shown first
    assert '<p class="value"><data value="200">200</data></p>' in shown
    assert "200 of " in shown
    cells = re.findall(r'<td><data value="(\d+)">', shown.partition("<details")[0])
    assert cells[0] == "200"
    assert shown.count("flips</span>") == 2
    assert 'Conversations with flips or cycles: <data value="200">' in shown
    assert "The first 30 of them." in shown
    linked = re.findall(r'<a href="(#run-0-\d+-\d+)">', shown)
    assert linked[0] == "#run-0-0-0"
    assert shown.count("<svg") == 2  # by step


def test_a_run_without_verdicts_has_no_judge(make_run: MakeRun) -> None:
    lines = [{"step": 0, "group": 0, "record": {"question": "How many?"}}]
    assert '<section id="judge">' not in page(make_run(transcripts=lines))


def test_evaluations_in_the_folder_of_the_run_are_shown_with_their_intervals(make_run: MakeRun) -> None:
    folder = make_run()
    write_result(folder / "eval")
    difference = {"value": 0.5, "against": 0.25, "difference": 0.25, "low": 0.125, "high": 0.375}
    write_result(
        folder / "eval", "b", format="viva comparison 1", first={"name": "x"}, second={"name": "y"},
        target=None, figures={"direct/avg@4": difference},
    )  # fmt: skip
    shown = section(page(folder), "evaluations")
    assert "some run 000025" in shown
    assert "x against y" in shown
    for value in (0.5625, 0.4375, 97, 0.25, 0.125, 0.375):
        assert f'<data value="{value!r}">' in shown
    assert "&lt;script&gt;alert(1)" in shown
    assert "<script" not in shown


def test_a_second_run_lies_over_the_first_and_all_else_stands_below(make_run: MakeRun) -> None:
    first, second = make_run(name="one"), make_run(name="two", config={"seed": 5, "model_name": "tiny"})
    text = page(first, second)
    curves = section(text, "curves")
    assert "one: " in curves
    assert "two: " in curves
    assert 'class="line c0 dashed"' in curves
    assert re.findall("<title>([^<]*): Viva report</title>", text) == ["one and two"]
    for name in ("judge", "conversations"):
        assert re.findall("<h3>(one|two)</h3>", section(text, name)) == ["one", "two"]
    assert '<td class="differs">' in section(text, "configuration")
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert any(name.startswith("run-1-") for name in ids)
    assert {link[1:] for link in re.findall(r'href="([^"]+)"', text)} <= set(ids)
    assert not (second / "report.html").exists()


def test_scores_have_error_bars_and_critiques_are_arrows_that_lead_to_their_text(
    make_run: MakeRun, critique_transcript: MakeLine
) -> None:
    line = critique_transcript(0, 0)
    text = page(make_run(transcripts=[line]))
    record = line["record"]
    assert text.count('class="score after"') == len(record["scores"]["final"])
    bars = len(record["scores"]["initial_error"]) + len(record["scores"]["final_error"])
    assert text.count('class="whisker') == bars
    given = [
        f"run-0-0-0-critique-{turn['agent_id']}-{critique['target']}-{turn['round_index']}"
        for turn in record["turns"]
        for critique in turn["response"].get("critiques") or ()
    ]
    assert given
    for place in given:
        assert text.count(f'<a href="#{place}"') == 1
        assert text.count(f'<div id="{place}">') == 1


def test_a_result_of_viva_eval_has_a_report_of_its_own(
    tmp_path: Path, transcript: MakeLine, capsys: pytest.CaptureFixture[str]
) -> None:
    result = write_result(tmp_path / "results")
    lines = [json.dumps(transcript(0, group)) for group in range(3)]
    result.with_suffix(".transcripts.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["report", str(result)]) == 0
    path = tmp_path / "results" / "report.html"
    assert capsys.readouterr().out == f"{path}\n"
    text = path.read_text(encoding="utf-8")
    assert "some run 000025" in section(text, "evaluations")
    assert "Solution" in section(text, "conversations")
    assert "flip" in section(text, "judge")
    assert "seed" in section(text, "configuration")
    assert main(["report", str(tmp_path / "results"), "-o", str(tmp_path / "all.html")]) == 0
    assert "some run 000025" in (tmp_path / "all.html").read_text(encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 2
    assert "no results of viva eval" in capsys.readouterr().err


def test_the_system_message_and_the_judges_prompt_stand_in_the_report(
    make_run: MakeRun, transcript: MakeLine
) -> None:
    said = transcript(0, 0)
    said["record"] |= {
        "system_prompt": "You solve.",
        "judge": {"system_prompt": "You compare.", "prefill": "{"},
    }
    said["record"]["comparisons"][0]["prompt"] = "Which of the two?"
    page = write_report(make_run(transcripts=[said])).read_text()
    for text in ("System message", "You solve.", "What the judge read", "You compare.", "Which of the two?"):
        assert text in page
