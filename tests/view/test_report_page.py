"""The report, and results of `viva eval`, in a real browser: clicked and read; the report without a script."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, IN_CI, chromium, served
from keyboard_walk import make_runs
from view_runs import HOSTILE, transcript, write_lines

from viva.view.page import write_report

pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None and not IN_CI, reason="no chromium on the PATH (apt-get install chromium)"
    ),
]

COLOURS = """selector => ["color", "backgroundColor"].map(
    name => getComputedStyle(document.querySelector(selector))[name].match(/[\\d.]+/g).map(Number)
)"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = make_runs(tmp_path_factory.mktemp("runs"))
    write_lines(made[0] / "transcripts.jsonl", [transcript(21, 0, question=HOSTILE, tags=[HOSTILE])])
    return made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page
        assert page.mistakes == []


@pytest.fixture(scope="module")
def report(browser: Any, runs: list[Path]) -> Any:
    path = write_report(runs[0], runs[0] / "two.html", second=runs[1])
    browser.goto(path.as_uri())
    yield browser
    assert [url for url in browser.strangers if not url.startswith(("file:", "http://127.0.0.1"))] == []


def test_two_runs_lie_over_each_other_and_are_smoothed_at_a_click(report: Any) -> None:
    chart = report.locator("#chart-test-direct-accuracy, #chart-optim-loss").last
    section = chart.locator("xpath=ancestor::details")
    if section.get_attribute("open") is None:
        section.locator("summary").first.click()
    assert chart.locator("polyline.line:not(.smooth)").count() == 2
    assert chart.locator("polyline.dashed:not(.smooth)").count() == 1
    smooth = chart.locator("polyline.smooth").first
    assert not smooth.is_visible()
    report.get_by_label("smoothed").check()
    assert smooth.is_visible()
    report.get_by_label("as measured").check()
    assert not smooth.is_visible()
    assert "run-a: loss, 0: 0" in chart.locator("circle title").first.text_content()


def test_the_title_of_a_chart_is_a_link_to_it(report: Any) -> None:
    report.locator("#chart-judge-verdicts figcaption a").click()
    assert report.url.endswith("#chart-judge-verdicts")
    assert report.evaluate("document.querySelector(':target').id") == "chart-judge-verdicts"


def test_the_judge_is_summed_up_over_all_conversations(report: Any) -> None:
    judge = report.locator("#judge")
    assert judge.locator("h3").all_inner_texts() == ["run-a", "run-b"]
    cards = judge.locator(".cards").first.locator(".value").all_inner_texts()
    assert cards == ["82", "33.3 %", "82", "58.5 %"]
    cells = judge.locator("table.orders").first.locator("tbody td").all_inner_texts()
    assert cells == ["82 flips", "82", "0", "82", "0 flips", "0", "0", "0", "0"]
    judge.locator("summary").first.click()
    judge.locator("table.telling a").first.click()
    assert report.evaluate("document.querySelector(':target').id") == "run-0-0-0"


def test_an_arrow_leads_to_its_critique_by_mouse_and_by_keyboard(report: Any) -> None:
    arrows = report.locator("#run-0-0-0 .pictures a")
    assert arrows.count() == 3
    for index, place in ((0, "run-0-0-0-critique-0-1-1"), (2, "run-0-0-0-critique-2-0-1")):
        if index:
            arrows.nth(index).focus()
            report.keyboard.press("Enter")
        else:
            arrows.nth(index).locator("path.head").click()
        report.wait_for_function("id => document.querySelector(':target')?.id === id", arg=place)
    assert "agent 0 is off by one" in report.locator(":target pre").inner_text()
    assert report.locator("#run-0-0-0 .whisker").count() == 6


def test_what_was_hidden_leads_to_where_it_was_said(report: Any) -> None:
    turn = report.locator("#run-0-0-0-turn-9")
    turn.locator("summary", has_text="What it read").click()
    assert turn.locator(".hidden li").count() == 7
    turn.locator(".hidden a").first.click()
    assert report.evaluate("document.querySelector(':target').id") == "run-0-0-0-turn-0"


def test_tokens_are_shaded_by_one_stream_at_a_click(report: Any) -> None:
    article = report.locator("#run-0-0-0")
    article.locator(".credit summary").first.click()
    token = article.locator(".tokens span").first
    shade = "node => getComputedStyle(node).backgroundColor"
    assert token.evaluate(shade) != "rgba(0, 0, 0, 0)"
    article.locator(".streams label", has_text="r_diag").click()
    assert token.evaluate(shade) == "rgba(0, 0, 0, 0)"
    article.locator(".streams label", has_text="r_sol").click()
    assert token.evaluate(shade) != "rgba(0, 0, 0, 0)"
    assert "training logprob -0.5" in article.locator(".tokens span").nth(1).get_attribute("title")
    article.locator(".credit summary").nth(1).click()
    left, right = (article.locator(".contexts > div").nth(place).bounding_box() for place in (0, 1))
    assert (left["y"], left["x"] + left["width"] <= right["x"]) == (right["y"], True)


def test_evaluations_and_options_are_there(report: Any) -> None:
    assert "run-a 000020" in report.locator("#evaluations summary").first.inner_text()
    cells = report.locator("table.figures tbody td").all_inner_texts()
    assert cells == ["0.5", "0.4", "0.6", "100"]
    report.locator("#configuration summary").click()
    assert report.locator("td.differs").all_inner_texts() == ["0", "1"]


def test_hostile_text_is_only_shown(report: Any) -> None:
    assert report.locator("script, img, iframe, main style").count() == 0
    assert report.get_by_text("<script>document.title='broken in'</script>").count() > 0
    assert "broken in" not in report.title()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_in_light_and_dark(report: Any, scheme: str) -> None:
    report.emulate_media(color_scheme=scheme)
    ink, page = report.evaluate(COLOURS, "body")
    assert (sum(ink) < sum(page)) == (scheme == "light")
    assert abs(sum(ink[:3]) - sum(page[:3])) > 450
    paper = report.evaluate(COLOURS, "figure")[1]
    assert abs(sum(paper[:3]) - sum(page[:3])) < 100


def test_a_result_of_viva_eval_is_looked_at_with_its_conversations(
    browser: Any, runs: list[Path], tmp_path: Path
) -> None:
    result = tmp_path / "tiny-1.json"
    result.write_text((runs[0] / "eval" / "000020-a.json").read_text())
    write_lines(tmp_path / "tiny-1.transcripts.jsonl", [transcript(0, group) for group in range(3)])
    compared = {
        "format": "viva comparison 1", "first": {"name": "x"}, "second": {"name": "y"},
        "figures": {"direct/avg@4": {"value": 0.5, "against": 0.25, "difference": 0.25, "low": 0.1, "high": 0.4}},
    }  # fmt: skip
    other = tmp_path / "tiny-2.json"
    other.write_text(json.dumps(compared))
    with served(result, other) as address:
        browser.goto(address)
        browser.wait_for_selector(".evaluation table")  # where results are shown first
        assert browser.locator(".evaluation h3").all_inner_texts() == ["run-a 000020", "x against y"]
        cells = browser.locator("[data-name=tiny-2] tbody td").all_inner_texts()
        assert cells == ["0.5", "0.25", "0.25", "0.1", "0.4"]
        browser.keyboard.press("2")
        browser.wait_for_function("() => document.getElementById('total')?.textContent === '3'")
        browser.locator(".list tbody a").first.click()
        browser.wait_for_selector(".judge-panel")
        assert "tiny-1.json 3 conversations" in browser.locator("#runs").inner_text().replace("\n", " ")
