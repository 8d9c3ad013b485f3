"""The page in a real browser: every feature is clicked and read; hostile text does nothing."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, IN_CI, VIEWPORT, Drawn, chromium, served
from view_runs import HOSTILE, metrics_row, tokens, transcript, turn, write_lines

pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None and not IN_CI, reason="no chromium on the PATH (apt-get install chromium)"
    ),
]

LONG = "x" * 500_000 + "needle" + "y" * 500_000


ALL_READ = "() => document.body.dataset.version && document.getElementById('status').textContent === ''"

MIDDLE = """path => {
    path.scrollIntoView({ block: "center" });
    const at = path.getPointAtLength(path.getTotalLength() / 2).matrixTransform(path.getScreenCTM());
    return [at.x, at.y];
}"""

COLOURS = """["color", "backgroundColor"].map(
    name => getComputedStyle(document.body)[name].match(/\\d+/g).slice(0, 3).map(Number)
)"""


class Site(Drawn):
    """The page with its server."""

    def __init__(self, page: Any, address: str, folders: list[Path]) -> None:
        super().__init__(page)
        self.folders = folders
        page.goto(address)
        page.wait_for_function(ALL_READ)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    runs = [folder / "run-a", folder / "run-b"]
    for shift, run in enumerate(runs):
        run.mkdir()
        (run / "config.json").write_text(json.dumps({"model_name": "tiny", "seed": shift}))
        write_lines(run / "metrics.jsonl", [metrics_row(step, 0.1 * shift) for step in range(30)])
        write_lines(
            run / "transcripts.jsonl", [transcript(step, group) for step in range(30) for group in range(4)]
        )
        write_lines(run / "tokens.jsonl", [tokens(step, 0) for step in range(0, 30, 10)])
    said = turn(0, 0, "proposal", {"solution": LONG, "reflection": HOSTILE}, text=LONG, prompt=HOSTILE)
    reasons = [{"agent_id": 1, "round_index": 0, "reason": HOSTILE}]
    hostile = {
        "question": HOSTILE,
        "judge_answer": HOSTILE,
        "criteria": [{"text": HOSTILE, "weight": 2.0}, {"text": "It is short.", "weight": 1.0}],
        "rubric": {"0": [0.25, None]},
        "comparisons": [],
        "turns": [said],
        "tags": [HOSTILE],
        "strategy": HOSTILE,
        "failures": reasons,
    }
    write_lines(runs[0] / "transcripts.jsonl", [transcript(30, 0, void=True, void_reason=HOSTILE, **hostile)])
    broken = (
        json.dumps(transcript(30, 1, question="BYTES"))
        .encode()
        .replace(b"BYTES", b"\xff\xfe \xed\xa0\x80 end")
    )
    with (runs[0] / "transcripts.jsonl").open("ab") as file:
        file.write(broken + b"\n")
    write_lines(runs[0] / "tokens.jsonl", [tokens(30, 0, strategy=HOSTILE) | {"turns": [hostile_tokens()]}])
    write_lines(runs[0] / "metrics.jsonl", [{"step": 30, f"{HOSTILE}/<b>": 1.0}])
    figures = {
        "avg@4": {"value": 0.5, "low": 0.4, "high": 0.6, "num_problems": 100},
        HOSTILE: {"value": None},
    }
    result = {
        "format": "viva evaluation 1",
        "target": {"name": "run-a", "checkpoint": "000030"},
        "figures": figures,
    }
    (runs[0] / "eval").mkdir()
    (runs[0] / "eval" / "000030-a.json").write_text(json.dumps(result))
    with served(*runs) as address, chromium(folder / "profile") as page:
        yield Site(page, address, runs)
        assert page.mistakes == []
        assert page.strangers == []


def hostile_tokens() -> dict[str, Any]:
    return tokens(0, 0)["turns"][0] | {
        "pieces": ["<script>", HOSTILE, "\ud800"],
        "sampled_in": HOSTILE,
        "trained_in": HOSTILE,
    }


def test_curves_are_grouped_and_two_runs_lie_over_each_other(site: Site) -> None:
    page = site.show("curves")
    page.wait_for_selector("figure[data-chart='test: direct_accuracy'] svg")
    groups = [text.lower() for text in site.texts(".groups h2")]
    assert groups[:5] == ["learning", "rewards", "judge health", "ratios per strategy", "speed"]
    legend = site.texts("figure[data-chart='test: direct_accuracy'] .legend")
    assert [text.partition(":")[0] for text in legend] == ["run-a", "run-b"]
    assert page.locator("figure[data-chart='test: direct_accuracy'] path.band").count() == 2


def test_every_metric_has_its_chart(site: Site) -> None:
    page = site.show("curves")
    folded = page.locator("details[data-section]:not([open]) > summary")
    while folded.count():
        folded.first.click()
    page.locator("figure[data-chart='time: step']").scroll_into_view_if_needed()
    page.wait_for_selector("figure[data-chart='time: step'] svg")
    assert len(site.texts("figure")) == 8  # of ten metrics, two pairs share a chart
    assert "<script>document.title='broken in'<" in page.evaluate(
        "document.querySelector('.groups').textContent"
    )


def test_the_mouse_and_the_arrow_keys_read_values_off(site: Site) -> None:
    page = site.show("curves/test/direct_accuracy")
    chart = page.locator("figure svg")
    chart.wait_for()
    box = chart.bounding_box()
    chart.hover(position={"x": box["width"] * 52 / 900 + 2, "y": box["height"] / 2})
    assert site.texts(".values .step") == ["step 0"]
    assert "0.4 ±" in site.texts(".values .legend")[0]
    assert "0.5 ±" in site.texts(".values .legend")[1]
    chart.focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert site.texts(".values .step") == ["step 2"]
    assert "0.42 ±" in site.texts(".values .legend")[0]


def test_smoothing_is_in_the_address_and_keeps_the_measured_value_in_brackets(site: Site) -> None:
    page = site.show("curves/optim/loss?smooth=0.9")
    page.wait_for_selector("path.raw")
    smoothed = site.texts(".values .legend")[0]
    assert re.search(r"\(-0\.\d+\)", smoothed)
    slider = page.locator("#smooth")
    assert slider.input_value() == "0.9"
    slider.fill("0")
    page.wait_for_selector("path.raw", state="detached")
    assert "smooth" not in page.url
    assert page.url.endswith("#/curves/optim/loss")


def test_a_name_is_found_and_a_chart_has_a_link_of_its_own(site: Site) -> None:
    page = site.show("curves")
    page.locator("#filter").fill("tie_rate")
    page.wait_for_function("() => document.querySelectorAll('figure').length === 2")
    assert sorted(site.texts("figcaption a")) == ["tie_rate of the rankings", "verdicts"]
    page.locator("figcaption a", has_text="verdicts").click()
    page.wait_for_selector(".alone figure")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector(".alone figure svg")
    assert site.texts("figcaption") == ["judge: verdicts"]


def rows(site: Site) -> list[tuple[str, str]]:
    cells = site.page.locator(".list tbody tr").all()
    return [(row.locator("th").inner_text(), row.locator("td").first.inner_text()) for row in cells]


def test_conversations_are_filtered_by_step_strategy_reward_answers_and_failure(site: Site) -> None:
    page = site.show("conversations")
    page.wait_for_selector(".list")
    assert site.texts("#total") == ["122"]
    page.locator("select[name=strategy]").select_option("feedback")
    page.wait_for_function("() => document.getElementById('total').textContent === '30'")
    page.locator("input[name=step_from]").fill("2")
    page.locator("input[name=step_to]").fill("3")
    page.wait_for_function("() => document.getElementById('total').textContent === '2'")
    assert rows(site) == [("2", "2"), ("3", "2")]
    assert "strategy=feedback" in page.url
    site.show("conversations")
    page.locator("select[name=answers]").select_option("wrong")
    page.wait_for_function("() => document.getElementById('total').textContent === '0'")
    page.locator("select[name=answers]").select_option("mixed")
    page.wait_for_function("() => document.getElementById('total').textContent === '122'")
    page.locator("select[name=state]").select_option("failed")
    page.wait_for_function("() => document.getElementById('total').textContent === '1'")
    page.locator("select[name=state]").select_option("")
    page.locator("input[name=reward_from]").fill("9")
    page.wait_for_function("() => document.getElementById('total').textContent === '14'")
    for filters, expected in (
        ("answers=right", "0"),
        ("state=void", "1"), ("state=failed", "1"), ("answers=mended&step_to=0", "2"), ("answers=mixed&run=1", "120"),
        ("reward_from=9", "14"), ("text=box+7-3", "1"),
    ):  # fmt: skip
        site.show(f"conversations?{filters}")
        page.wait_for_selector("#total")
        assert (filters, site.texts("#total")) == (filters, [expected])


def test_the_list_has_pages(site: Site) -> None:
    page = site.show("conversations?order=-step")
    page.get_by_role("button", name="Next page").click()
    page.wait_for_function("() => document.querySelector('.pages').textContent.includes('page 2 of 3')")
    assert "page=1" in page.url


def test_what_an_agent_saw_unfolds_and_what_was_hidden_is_marked(site: Site) -> None:
    page = site.show("conversation/0/0")
    page.wait_for_selector("#turn-9")
    assert page.locator("table.rounds thead th").count() == 4
    revision = page.locator("#turn-9")
    assert not revision.locator("pre.prompt").is_visible()
    revision.locator(".saw > summary").click()
    assert "Your solution:\n> third: 10" in revision.locator("pre.prompt").inner_text()
    assert "solution by agent 2 (round 1, proposal)" in revision.locator(".seen").inner_text()
    hidden = revision.locator(".hidden-part")
    assert hidden.count() == 7
    assert hidden.first.locator("s").inner_text() == "solution by agent 0 (round 1, proposal)"
    hidden.first.locator("summary").click()
    assert hidden.first.locator("pre").inner_text() == "first: 12"
    assert revision.locator(".part h4").all_inner_texts() == ["DECISION", "SOLUTION"]
    page.locator("#turn-9 .sampled > summary").click()
    assert revision.locator(".sampled pre").inner_text() == "revision of agent 2"


def test_critiques_are_arrows_that_lead_to_their_text(site: Site) -> None:
    page = site.show("conversation/0/0")
    page.wait_for_selector(".arrows .arc")
    arcs = page.locator(".arrows .arc")
    assert [arc.get_attribute("aria-label") for arc in arcs.all()] == [
        f"critique of agent {(agent + 1) % 3} by agent {agent}" for agent in range(3)
    ]
    page.mouse.click(*arcs.nth(0).locator("path").evaluate(MIDDLE))
    page.wait_for_selector("#critique-0-1-1.flash")
    arcs.nth(2).press("Enter")
    page.wait_for_selector("#critique-2-0-1.flash")
    assert page.locator("#critique-2-0-1 pre").inner_text() == "agent 0 is off by one"


def test_scores_have_error_bars_and_every_stream_is_listed(site: Site) -> None:
    page = site.show("conversation/0/0")
    page.wait_for_selector("figure.scores")
    assert page.locator("figure.scores line.whisker").count() == 6
    label = page.locator("figure.scores svg").get_attribute("aria-label")
    assert "agent 0: 0.25 before, 0.5 after" in label
    heads = site.texts("table.streams thead th")
    assert heads == [
        "agent",
        "V before",
        "V after",
        "change",
        "right",
        "r_sol",
        "r_meta",
        "r_diag",
        "total",
        "reward",
    ]
    first = page.locator("table.streams tbody tr").first.inner_text()
    assert "0.250 ± 0.100" in first
    assert "0.500 ± 0.050" in first


def test_rankings_are_a_matrix_with_cycles_and_agreement(site: Site) -> None:
    page = site.show("conversation/0/0")
    page.wait_for_selector("table.matrix")
    assert page.locator("table.matrix tbody tr").first.locator("td").all_inner_texts() == ["", "2", ""]
    assert page.locator(".rankings .cycles").inner_text() == "agent 0 > agent 1 > agent 2 > agent 0"
    assert page.locator(".rankings .agreement").inner_text() == "50.0 % (1 of 2)"


def test_verdicts_stand_in_both_orders_with_flips_marked(site: Site) -> None:
    page = site.show("conversation/0/0")
    page.wait_for_selector("table.verdicts")
    flipped = page.locator("table.verdicts td.flipped")
    assert flipped.count() == 2
    assert "agent 0" in flipped.first.inner_text()
    assert page.locator(".judge-panel .flips").inner_text() == "33.3 % (1 of 3)"
    assert page.locator(".judge-panel .cycles").inner_text() == "none"
    assert page.locator(".judge-panel .agreement").inner_text() == "75.0 % (3 of 4)"


def test_tokens_are_shaded_by_stream_and_tell_their_numbers(site: Site) -> None:
    page = site.show("conversation/0/0")
    page.wait_for_selector(".tok")
    first = page.locator(".token-turn").first
    assert [name.split()[1] for name in classes(first)] == ["ap5", "ap5", "a0"]
    page.get_by_role("button", name="r_diag").click()
    assert [name.split()[1] for name in classes(first)] == ["a0", "a0", "a0"]
    page.get_by_role("button", name="r_sol").click()
    first.locator(".tok").nth(1).hover()
    info = {name: page.locator(f".token-info dd[data-name='{name}']").inner_text() for name in (
        "id", "stream", "sampling logprob", "training logprob", "ratio", "weight", "mask", "advantage", "reward",
    )}  # fmt: skip
    assert info == {
        "id": "12", "stream": "r_sol", "sampling logprob": "-0.25", "training logprob": "-0.5", "ratio": "0.7788",
        "weight": "1", "mask": "1", "advantage": "0.5", "reward": "0.75",
    }  # fmt: skip
    first.locator(".token-line").focus()
    page.keyboard.press("End")
    assert page.locator(".token-info dd[data-name='id']").inner_text() == "13"
    assert "masked" in classes(first)[2]


def classes(box: Any) -> list[str]:
    return [token.get_attribute("class") for token in box.locator(".tok").all()]


def test_a_swapped_sample_shows_both_contexts_side_by_side(site: Site) -> None:
    page = site.show("conversation/0/0")
    page.wait_for_selector(".token-turn")
    page.locator(".token-turn").nth(1).locator("summary").click()
    assert page.locator(".sampled-in pre").inner_text() == "Problem and a hint"
    assert page.locator(".trained-in pre").inner_text() == "Problem alone"
    left, right = page.locator(".sampled-in").bounding_box(), page.locator(".trained-in").bounding_box()
    assert (left["y"], left["x"] + left["width"] <= right["x"]) == (right["y"], True)
    page.locator("#turn-0 button", has_text="tokens").click()
    assert page.locator(".token-turn").first.get_attribute("open") is not None


def test_the_judge_is_summed_up_over_conversations(site: Site) -> None:
    page = site.show("judge?step_to=9")
    page.wait_for_selector("#judge-flips")
    assert site.texts("#judge-flips") == ["33.3 % (40 of 120)"]
    assert site.texts("#judge-cycles") == ["40"]
    cells = page.locator("table.orders tbody td").all_inner_texts()
    assert cells == ["40 flips", "40", "0", "40", "0 flips", "0", "0", "0", "0"]
    assert page.locator("table.orders td.flipped").count() == 2
    page.wait_for_selector("figure[data-chart='share of flips'] svg")
    page.locator(".list tbody a").first.click()
    page.wait_for_selector(".judge-panel")


def test_behind_the_last_page_of_the_judge_there_is_none(site: Site) -> None:
    page = site.show("judge?step_to=9")
    page.wait_for_selector(".pages")
    for _ in range(3):
        page.keyboard.press("]")
    page.keyboard.press("/")  # handled behind them
    assert "page 1 of 1" in page.locator(".pages").inner_text()
    assert "page=" not in page.url


def test_hostile_text_and_bytes_are_only_shown(site: Site) -> None:
    page = site.show("conversation/30/0")
    page.wait_for_selector(".tok")
    assert "<script>document.title='broken in'</script>" in page.locator(".question pre").first.inner_text()
    assert "\\u202e" in page.locator(".question pre").first.inner_text()
    assert site.texts(".question h4") == ["QUESTION", "RIGHT ANSWER", "THE JUDGE'S OWN ANSWER"]
    assert page.locator(".question pre").first.inner_text() == page.locator(".question pre").last.inner_text()
    assert page.locator("main script, main img, main iframe, main style").count() == 0
    assert "broken in" not in page.title()
    for place in ("conversations?order=-step", "judge", "curves", "options", "conversation/30/1"):
        site.show(place)
        assert "broken in" not in page.title()
    assert "end" in page.locator(".question pre").first.inner_text()


def test_a_reply_of_a_megabyte_is_cut_until_it_is_asked_for(site: Site) -> None:
    page = site.show("conversation/30/0")
    page.wait_for_selector("#turn-0")
    solution = page.locator("#turn-0 .part.solution pre")
    assert len(solution.inner_text()) < 10_000
    solution.locator("button.cut").click()
    page.wait_for_function(
        "() => document.querySelector('#turn-0 .part.solution pre').textContent.length > 1000000"
    )


def test_a_long_text_says_why_it_cannot_be_shown_when_the_server_has_ended(site: Site) -> None:
    page = site.show("conversation/30/0")
    page.wait_for_selector("#turn-0")
    button = page.locator("#turn-0 .part.solution button.cut")
    page.route("**/api/text*", lambda route: route.abort())
    button.click()
    page.wait_for_function(
        "() => document.querySelector('#turn-0 .part.solution button').textContent.includes('has ended')"
    )
    page.unroute("**/api/text*")
    page.mistakes.clear()  # the browser's own word about the request that failed
    button.click()
    page.wait_for_function(
        "() => document.querySelector('#turn-0 .part.solution pre').textContent.length > 1000000"
    )


def test_what_the_run_writes_appears_by_itself(site: Site) -> None:
    page = site.show("conversations?run=1")
    page.wait_for_function("() => document.getElementById('total').textContent === '120'")
    strategy = "[...document.querySelector('[name=strategy]').options].map(option => option.value).join()"
    before = page.evaluate(strategy)
    write_lines(site.folders[1] / "transcripts.jsonl", [transcript(30, 0, strategy="brand new")])
    write_lines(site.folders[1] / "metrics.jsonl", [metrics_row(30)])
    page.wait_for_function("() => document.getElementById('total').textContent === '121'")
    page.wait_for_function("() => document.getElementById('runs').textContent.includes('31 steps · 121')")
    assert page.evaluate(strategy) == before.replace(",", ",brand new,", 1)
    page = site.show("judge?run=1&strategy=a strategy of tomorrow")
    write_lines(site.folders[1] / "transcripts.jsonl", [transcript(31, 0, strategy="a strategy of tomorrow")])
    page.wait_for_function(
        "() => document.querySelector('[name=strategy]').value === 'a strategy of tomorrow'"
    )
    page.wait_for_function("() => document.getElementById('judge-conversations').textContent === '1'")


def test_evaluations_show_figures_with_their_intervals(site: Site) -> None:
    page = site.show("evaluations")
    assert site.texts(".evaluation h3") == ["run-a 000030"]
    cells = page.locator(".figures tbody tr").first.locator("td").all_inner_texts()
    assert cells == ["0.5", "0.4", "0.6", "100"]


def test_another_view_begins_at_its_top(site: Site) -> None:
    page = site.show("conversation/0/0")
    page.locator("#tokens").scroll_into_view_if_needed()
    assert page.evaluate("scrollY") > 300
    page.keyboard.press("3")
    page.wait_for_selector("#judge-flips")
    page.wait_for_function("() => scrollY === 0")


def test_differences_of_options_are_marked(site: Site) -> None:
    page = site.show("options")
    page.wait_for_selector(".options")
    assert page.locator("td.differs").all_inner_texts() == ["0", "1"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(site: Site, scheme: str) -> None:
    page = site.page
    page.emulate_media(color_scheme=scheme)
    colours = page.evaluate(COLOURS)
    one, other = sorted(map(luminance, colours))
    assert (other + 0.05) / (one + 0.05) > 7
    assert (luminance(colours[1]) < 0.5) == (scheme == "dark")


def luminance(colour: list[int]) -> float:
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


WIDE = """() => [...document.querySelectorAll("body *")]
  .filter((node) => node.getBoundingClientRect().right > innerWidth + 1)
  .filter((node) => !node.closest(".scroll, pre, svg, .skip, .quiet"))
  .map((node) => `${node.tagName}.${node.className} ${node.textContent.slice(0, 40)}`)"""


@pytest.mark.parametrize("width", [420, 320])
def test_nothing_scrolls_sideways_on_a_narrow_screen(site: Site, width: int) -> None:
    site.page.set_viewport_size({"width": width, "height": 800})
    try:
        places = [
            "curves",
            "conversations",
            "conversation/0/2/0",
            "conversation/0/2/2",
            "judge",
            "evaluations",
            "options",
        ]
        for place in places:
            page = site.show(place)
            page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            over = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert (over, page.evaluate(WIDE) if over > 0 else []) == (0, []), place
    finally:
        site.page.set_viewport_size(VIEWPORT)


def test_the_system_message_and_the_judges_prompt_are_shown(site: Site) -> None:
    page = site.show("conversation/0/2/0")
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert site.texts(".saw pre.system")[0] == "You solve problems together."
    shown = site.texts(".asked")[0]
    assert "You compare two solutions." in shown
    assert "Problem:\n> pens\nSolution A:\n> of agent 1" in shown


def test_other_rewards_are_worked_out_when_they_are_unfolded(site: Site) -> None:
    page = site.show("summary")
    section = "[data-run=run-a] details[data-section='other rewards']"
    assert page.locator("table.rewards").count() == 0
    page.locator(f"{section} > summary").click()
    page.wait_for_selector(f"{section} table.rewards tbody tr")
    names = site.texts(f"{section} tbody th")
    assert names[0] == "(paid)"
    assert "majority" in names
    assert page.locator("table.rewards").count() == 1
    before = page.evaluate("document.body.dataset.version")
    write_lines(site.folders[0] / "metrics.jsonl", [metrics_row(40)])
    page.wait_for_function("before => document.body.dataset.version !== before", arg=before)
    assert page.locator(f"{section}[open] table.rewards").count() == 1, "what is read stays open"
