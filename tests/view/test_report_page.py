"""The report, and results of `viva eval`, in a real browser: clicked and read."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, IN_CI, Drawn, chromium, served
from keyboard_walk import make_runs
from view_runs import HOSTILE, transcript, write_lines

from viva.view.report import write_report

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


class Report(Drawn):
    """The report of two runs."""

    def __init__(self, page: Any, path: Path) -> None:
        super().__init__(page)
        self.address = path.as_uri()

    def open(self) -> None:
        self.page.goto(self.address)
        self.page.wait_for_selector(".run-summary")

    def show(self, place: str) -> Any:
        if self.page.url.partition("#")[0] != self.address:
            self.open()  # another test has shown another page
        return super().show(place)


@pytest.fixture(scope="module")
def report(browser: Any, runs: list[Path]) -> Iterator[Report]:
    yield Report(browser, write_report(runs[0], runs[0] / "two.html", second=runs[1]))
    assert [url for url in browser.strangers if not url.startswith(("file:", "http://127.0.0.1"))] == []


def test_it_opens_with_a_summary_of_both_runs(report: Report) -> None:
    report.open()
    assert report.texts(".run-summary h2") == ["run-a", "run-b"]
    cards = report.texts(".run-summary[data-run=run-a] .card")
    assert cards[0].split("\n\n") == ["before (step 0)", "40.0 %", "95 % interval 36.1 to 43.9 %"]
    assert cards[2].split("\n\n")[:2] == ["gain", "+19.0 points"]
    assert report.page.locator("figure path.line").count() == 2
    assert report.texts("#views a") == [
        "Summary",
        "Curves",
        "Conversations",
        "Judge",
        "Evaluations",
        "Options",
    ]


def test_other_rewards_unfold_in_the_summary(report: Report) -> None:
    report.open()
    assert report.page.locator("table.rewards").count() == 0
    section = "[data-run=run-b] details[data-section='other rewards']"
    report.page.locator(f"{section} > summary").click()
    report.page.wait_for_selector(f"{section} table.rewards")
    names = report.texts(f"{section} tbody th")
    assert names[0] == "(paid)"
    assert {"majority", "tournament"} <= set(names)
    assert any(each.startswith("judge_answer: the reward") for each in report.texts(f"{section} li"))
    assert report.page.locator("table.rewards").count() == 1


def test_two_runs_lie_over_each_other_smoothed_and_as_numbers(report: Report) -> None:
    page = report.show("curves")
    figure = "figure[data-chart='test: direct_accuracy']"
    page.wait_for_selector(f"{figure} svg")
    assert page.locator(f"{figure} path.line.run1").count() == 1
    page.locator("#smooth").fill("0.9")
    page.wait_for_selector(f"{figure} path.raw")
    section = page.locator("details[data-section=test]")
    section.locator("details.numbers summary").click()
    section.locator("details.numbers tbody tr").first.wait_for()
    assert report.texts("details[data-section=test] details.numbers tbody tr") == [
        "run-a: test/direct_accuracy\t20\t0.4\t0.59\t0.4\t0.59",
        "run-b: test/direct_accuracy\t20\t0.5\t0.69\t0.5\t0.69",
    ]
    page.locator(f"{figure} figcaption a").click()
    page.wait_for_selector(".alone figure svg")


def test_the_judge_is_summed_up_over_all_conversations(report: Report) -> None:
    page = report.show("judge")
    assert report.texts(".cards .value") == ["82", "33.3 % (82 of 246)", "82", "58.5 % (288 of 492)"]
    assert report.texts("table.orders tbody td") == [
        "82 flips",
        "82",
        "0",
        "82",
        "0 flips",
        "0",
        "0",
        "0",
        "0",
    ]
    assert report.texts(".pages") == ["82; the first 30 of them"]
    assert 0 < page.locator("table.list a").count() < page.locator("table.list tbody tr").count()
    page.locator("table.list a").first.click()
    page.wait_for_selector(".judge-panel")
    page = report.show("judge?run=1")
    assert report.texts("#judge-conversations") == ["81"]


def test_a_sample_of_conversations_is_listed_with_what_it_is_shown_for(report: Report) -> None:
    page = report.show("conversations")
    assert "of 82 conversations: a sample" in report.texts(".pages")[0]
    assert "the first conversation of the run" in report.texts(".list tbody tr")[0]
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".judge-panel")
    assert "Shown: the first conversation of the run." in report.texts("p.muted")
    page.keyboard.press("j")  # the next of the sample
    page.wait_for_function("() => !location.hash.startsWith('#/conversation/0/0')")


def test_an_arrow_leads_to_its_critique_and_what_was_hidden_is_named(report: Report) -> None:
    page = report.show("conversation/0/0")
    assert page.locator(".arc").count() == 3
    assert page.locator(".whisker").count() == 6
    page.locator(".arc").nth(2).press("Enter")
    page.wait_for_selector("#critique-2-0-1.flash")
    assert "agent 0 is off by one" in page.locator("#critique-2-0-1 pre").inner_text()
    turn = page.locator("#turn-9")
    turn.locator("summary", has_text="What it saw").click()
    assert turn.locator(".hidden-part").count() == 7
    assert page.locator("table.streams thead th").all_inner_texts()[:4] == [
        "agent",
        "V before",
        "V after",
        "change",
    ]


def test_a_long_text_is_cut(report: Report) -> None:
    report.show("conversation/20/0?run=1")
    assert any("14,500 characters left out" in text for text in report.texts(".cut"))


def test_tokens_are_shaded_by_one_stream_at_a_click(report: Report) -> None:
    page = report.show("conversation/0/0")
    token = page.locator(".tok").first
    shade = "node => getComputedStyle(node).backgroundColor"
    assert token.evaluate(shade) != "rgba(0, 0, 0, 0)"
    page.locator(".toggle[data-name=r_diag]").click()
    assert token.evaluate(shade) == "rgba(0, 0, 0, 0)"
    page.locator(".tok").nth(1).click()
    assert report.texts(".token-info [data-name='training logprob']") == ["-0.5"]


def test_evaluations_and_options_are_there(report: Report) -> None:
    report.show("evaluations")
    assert report.texts(".evaluation h3") == ["run-a 000020"]
    assert report.texts("table.figures tbody td") == ["0.5", "0.4", "0.6", "100"]
    report.show("options")
    assert report.texts("td.differs") == ["0", "1"]


def test_hostile_text_is_only_shown(report: Report) -> None:
    page = report.show("conversation/21/0")
    assert page.locator("main script, img, iframe, main style").count() == 0
    assert page.get_by_text("<script>document.title='broken in'</script>").count() > 0
    assert "broken in" not in page.title()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_in_light_and_dark(report: Report, scheme: str) -> None:
    page = report.show("summary")
    page.emulate_media(color_scheme=scheme)
    ink, paper = page.evaluate(COLOURS, "body")
    assert (sum(ink) < sum(paper)) == (scheme == "light")
    assert abs(sum(ink[:3]) - sum(paper[:3])) > 450


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
        browser.goto("about:blank")  # nothing asks a server that is gone
