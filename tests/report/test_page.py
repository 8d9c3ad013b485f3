"""The page: self-contained, well-formed, safe with hostile text, and true to the files."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from viva.view.headline import Gain, accuracy_gain, headline_text
from viva.view.page import write_report
from viva.view.run_files import read_run

MakeRun = Callable[..., Path]
MakeLine = Callable[..., dict[str, Any]]

VOID = {"meta", "br", "input"}
SVG_EMPTY = {"line", "polyline", "polygon"}
LINKING = {"src", "href", "srcset", "action", "data", "poster", "style", "background", "xlink:href"}

HOSTILE = [
    "<script>alert(1)</script>",
    "</pre></td></table><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "<!-- ", "--> ", "]]>", "</style>", "</title>", "&lt;script&gt;", "\u202e gnp.exe", "\x00\x07\x1b[31m",
]  # fmt: skip


class Page(HTMLParser):
    """Reads a page strictly: every element that opens must close, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.values: list[float] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "data":
            self.values.append(float(dict(attrs)["value"] or ""))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in SVG_EMPTY
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.stack[-1] if self.stack else "", data))

    @property
    def text(self) -> str:
        return "".join(text for tag, text in self.texts if tag != "style")

    def count(self, tag: str, css_class: str) -> int:
        return sum(
            name == tag and css_class in (attrs.get("class") or "").split() for name, attrs in self.tags
        )


def report(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_the_page_is_well_formed_and_refers_to_nothing_outside(make_run: MakeRun) -> None:
    page = report(make_run())
    for tag, attributes in page.tags:
        assert not (LINKING - {"href"}) & set(attributes), (tag, attributes)
        assert re.fullmatch(r"#[a-z0-9-]+", attributes.get("href") or "#x"), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
        assert tag not in ("script", "link", "iframe", "object", "embed", "base", "form", "img")
    places = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(places) == len(set(places))
    links = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    assert links <= {f"#{place}" for place in places}
    style = "".join(text for tag, text in page.texts if tag == "style")
    assert "url(" not in style
    assert "@import" not in style


def test_the_policy_allows_the_one_style_and_nothing_else(make_run: MakeRun) -> None:
    page = report(make_run())
    metas = [attributes for tag, attributes in page.tags if tag == "meta" and "http-equiv" in attributes]
    style = "".join(text for tag, text in page.texts if tag == "style")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert [meta["content"] for meta in metas] == [
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    ]
    assert sum(tag == "style" for tag, _ in page.tags) == 1


def test_hostile_text_in_every_field_stays_text(
    make_run: MakeRun, transcript: MakeLine, turn: MakeLine
) -> None:
    evil = "".join(HOSTILE)
    turns = [
        turn(agent, 0, evil, prompt=evil, text=evil, status=evil, response=dict.fromkeys(FIELDS, evil))
        for agent in range(3)
    ]
    failures = [{"agent_id": 1, "round_index": 0, "reason": evil}]
    comparisons = [{"first": 0, "second": 1, "outcome": evil, "score": None, "text": evil}]
    line = transcript(
        0, 0, question=evil, answer=evil, tags=[evil], turns=turns, failures=failures,
        comparisons=comparisons, void=True, void_reason=evil,
    )  # fmt: skip
    metrics = [{"step": step, evil: 1.0, f"agent_0/{evil}": 2.0, f"{evil}/{evil}": 3.0} for step in range(2)]
    page = report(make_run(metrics=metrics, transcripts=[line], config={evil: evil, "model_name": evil}))
    tame = report_of_tame_twin(make_run, transcript, turn)
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in tame.tags}
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "<script>alert(1)</script>" in page.text
    assert "\\u202e gnp.exe" in page.text
    assert "\u2400\u2407\u241b[31m" in page.text


FIELDS = ("reflection", "evaluation", "solution")


def report_of_tame_twin(make_run: MakeRun, transcript: MakeLine, turn: MakeLine) -> Page:
    failures = [{"agent_id": 1, "round_index": 0, "reason": "x"}]
    turns = [turn(agent, 0, "x", status="repaired") for agent in range(3)]
    lines = [transcript(0, 0, turns=turns, failures=failures, void=True)]
    return report(make_run(transcripts=lines, name="tame"))


def test_hostile_text_in_every_field_of_a_review_stays_text(
    make_run: MakeRun, critique_transcript: MakeLine
) -> None:
    evil = "".join(HOSTILE)
    line = critique_transcript(0, 0, rules={evil: evil})
    record = line["record"]
    for turn in record["turns"]:
        response = turn["response"]
        turn |= {"text": evil, "prompt": evil, "status": evil}
        turn["segment"] = evil + turn["segment"]
        response |= {key: evil for key in ("solution", "decision") if key in response}
        response |= {"dropped": {evil: 1}}
        if "critiques" in response:
            response["critiques"] = [{"target": 0, "text": evil, "start": 0, "stop": 1}]
        if "preferences" in response:
            response["preferences"] = [{"winner": [evil, 0], "loser": [evil, 1]}]
    record["streams"]["0"][evil] = 1.0
    record["comparisons"][0] |= {"outcome": evil, "text": evil}
    page = report(make_run(transcripts=[line]))
    tame = report(make_run(transcripts=[critique_transcript(0, 0)], name="tame"))
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in tame.tags}
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.text.count("<script>alert(1)</script>") > 50


def test_broken_surrogates_and_a_megabyte_reply_make_a_small_valid_page(
    make_run: MakeRun, transcript: MakeLine, turn: MakeLine
) -> None:
    long = "x" * 1_000_000
    lines = [transcript(0, 0, turns=[turn(0, 0, "\ud800 half"), turn(1, 0, long, text=long, prompt=long)])]
    folder = make_run(transcripts=lines)
    page = report(folder)
    assert "\ufffd half" in page.text
    assert page.text.count("994,500 characters left out") == 3
    assert (folder / "report.html").stat().st_size < 200_000


def test_numbers_of_the_page_are_those_of_the_files(make_run: MakeRun) -> None:
    folder = make_run()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = set(report(folder).values)
    assert rows[0]["test/direct_accuracy"] in values
    assert rows[-1]["test/direct_accuracy"] in values
    for key in rows[0]:
        if not key.startswith("test/") and key != "step":
            column = [float(row[key]) for row in rows]
            assert {column[0], column[-1], min(column), max(column)} <= values, key


def test_the_headline_states_accuracy_before_and_after_with_intervals(make_run: MakeRun) -> None:
    rows = [
        {"step": 0, "test/direct_accuracy": 0.40, "test/direct_accuracy_stderr": 0.03},
        {"step": 9, "test/direct_questions": 268},
        {"step": 5, "test/direct_accuracy": 0.99, "test/direct_accuracy_stderr": 0.0},
        {"step": 9, "test/direct_accuracy": 0.52, "test/direct_accuracy_stderr": 0.04},
    ]
    folder = make_run(metrics=rows)
    text = report(folder).text
    for shown in ("before (step 0)40.0 %", "95 % interval 34.1 to 45.9 %", "after (step 9)52.0 %"):
        assert shown in text
    assert "without any conversation (268 questions)" in text
    assert "gain+12.0 points95 % interval +2.2 to +21.8" in text
    gain = accuracy_gain(read_run(folder))
    assert gain is not None
    assert (gain.difference, gain.half_width) == pytest.approx((0.12, 1.959964 * 0.05))


def test_the_headline_in_one_line(make_run: MakeRun) -> None:
    rows = [
        {"step": 0, "test/direct_accuracy": 0.45, "test/direct_accuracy_stderr": 0.02},
        {"step": 20, "test/direct_accuracy": 0.6, "test/direct_accuracy_stderr": 0.0},
    ]
    assert headline_text(make_run(metrics=rows)) == (
        "held-out accuracy, asked directly: 45.0 % ± 3.9 before, 60.0 % after 20 steps "
        "(+15.0 points; intervals are 95 %)"
    )


def test_the_headline_tells_of_conversations_where_they_were_measured(make_run: MakeRun) -> None:
    rows = [
        {"step": 0, "test/direct_accuracy": 0.45, "test/conversation/rank_correlation": 0.25},
        {"step": 0, "test/conversation/correct/final": 0.5, "rank_correlation": -0.75},
        {"step": 20, "test/direct_accuracy": 0.6, "test/conversation/rank_correlation": -0.125},
        {"step": 20, "test/conversation/correct/final": 0.75},
    ]
    folder = make_run(metrics=rows)
    assert (headline_text(folder) or "").splitlines()[1:] == [
        "held-out conversations: right at the end 50.0 % before, 75.0 % after; rank correlation of scores with being "
        "right +0.25 before, -0.12 after"
    ]
    text = report(folder).text
    assert "held-out, right after a conversation (step 20)75.0 %at first 50 %" in text
    assert "rank correlation of scores with being right (step 20)-0.12at first +0.25" in text


def test_a_single_measurement_is_no_headline(make_run: MakeRun) -> None:
    assert headline_text(make_run(metrics=[{"step": 0, "test/direct_accuracy": 0.45}])) is None


def test_an_interval_of_a_share_stays_a_share(make_run: MakeRun) -> None:
    rows = [{"step": 0, "test/direct_accuracy": 0.99, "test/direct_accuracy_stderr": 0.05}]
    text = report(make_run(metrics=rows)).text
    assert "95 % interval 89.2 to 100.0 %" in text
    assert "gain" not in text


@pytest.mark.parametrize("error", [{}, {"test/direct_accuracy_stderr": 0.0}])
def test_accuracy_without_a_standard_error_has_no_interval(
    make_run: MakeRun, error: dict[str, float]
) -> None:
    rows = [{"step": step, "test/direct_accuracy": 0.5, **error} for step in (0, 1)]
    folder = make_run(metrics=rows)
    assert "interval" not in report(folder).text
    assert accuracy_gain(read_run(folder)) == Gain(
        first_step=0, last_step=1, before=0.5, after=0.5, before_half_width=None, after_half_width=None
    )


@pytest.mark.parametrize("missing", ["transcripts", "config", "metrics"])
def test_a_run_with_a_piece_missing_still_has_a_page(make_run: MakeRun, missing: str) -> None:
    rows: list[dict[str, Any]] = []
    page = report(make_run(**{missing: rows if missing == "metrics" else None}))
    heads = [text for tag, text in page.texts if tag == "h2"]
    there = {"transcripts": "Conversations", "config": "Configuration", "metrics": "Curves"}
    assert there.pop(missing) not in heads
    assert set(there.values()) <= set(heads)


def test_a_run_without_a_test_set_says_so(make_run: MakeRun) -> None:
    assert "no test set with answers" in report(make_run(metrics=[{"step": 0, "reward/mean": 0.0}])).text


def test_a_torn_last_line_is_left_out_and_said_so(make_run: MakeRun) -> None:
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "rew')
    assert "The last line of metrics.jsonl is torn" in report(folder).text


def test_conversations_show_rounds_by_agents_marks_and_verdicts_in_both_orders(
    make_run: MakeRun, transcript: MakeLine
) -> None:
    page = report(make_run(transcripts=[transcript(0, 0)]))
    assert (page.count("table", "rounds"), page.count("table", "verdicts")) == (1, 1)
    assert (page.count("span", "right"), page.count("span", "wrong")) == (2, 1)
    assert page.text.count("Solution") == 6
    # agents 0 and 1 each win when they are shown first; agent 2 loses in both orders
    assert page.count("span", "flip") == 4  # these, and the two places of flips in the judge's matrix
    assert page.count("td", "none") == 3
    assert {0.55, -0.15, -0.4, -0.5, 0.3, 0.7, 0.2, 0.1, 0.6} <= set(page.values)


def test_a_failed_agent_is_shown_with_its_reason(make_run: MakeRun) -> None:
    page = report(make_run())
    assert "TimeoutError: no reply within 60 s" in page.text
    assert "Void, it trained nothing" in page.text
    assert "unstructured" in page.text


def test_transcripts_without_a_record_are_counted_and_not_shown(make_run: MakeRun) -> None:
    lines = [{"step": 0, "group": group, "void": False, "rewards": [0.5, None]} for group in range(3)]
    page = report(make_run(transcripts=lines))
    assert "Conversations" not in [text for tag, text in page.texts if tag == "h2"]
    assert "conversations30 void" in page.text


def test_void_conversations_are_counted_by_reason(make_run: MakeRun) -> None:
    reasons = ["lost", "timeout", "timeout", None]
    lines = [
        {"step": 0, "group": group, "void": True, "void_reason": why} for group, why in enumerate(reasons)
    ]
    assert "voidreason2timeout1lost1no reason recorded" in report(make_run(transcripts=lines)).text


def test_the_same_files_give_the_same_bytes_and_no_litter(make_run: MakeRun) -> None:
    folder = make_run()
    first = write_report(folder).read_bytes()
    assert write_report(str(folder), folder / "again.html").read_bytes() == first
    assert sorted(path.name for path in folder.iterdir()) == [
        "again.html", "config.json", "metrics.jsonl", "report.html", "transcripts.jsonl",
    ]  # fmt: skip


def test_no_page_is_left_half_written(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config\\.json"):
        write_report(folder)
    assert not list(folder.glob("report*"))


def test_every_class_of_the_markup_has_a_style(
    make_run: MakeRun, transcript: MakeLine, critique_transcript: MakeLine
) -> None:
    page = report(make_run(transcripts=[transcript(0, 0), critique_transcript(1, 0)]))
    style = "".join(text for tag, text in page.texts if tag == "style")
    styled = set(re.findall(r"\.([a-z][\w-]*)", style))
    used = {name for _, attributes in page.tags for name in (attributes.get("class") or "").split()}
    assert used <= styled
