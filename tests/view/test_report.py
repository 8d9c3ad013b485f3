"""The report: one file that loads nothing, safe with hostile text, and true to the run's files."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from view_runs import answers_of, tokens

from viva.cli import main
from viva.run.secrets import printable
from viva.view import other_rewards
from viva.view.report import embedded_json, write_report
from viva.view.rescore import RescoreOptions, rescore

MakeRun = Callable[..., Path]
MakeLine = Callable[..., dict[str, Any]]

HOSTILE = [
    "<script>alert(1)</script>",
    "</pre></td></table><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "<!-- ", "--> ", "]]>", "</style>", "</title>", "&lt;script&gt;", "\u202e gnp.exe", "\x00\x07\x1b[31m",
]  # fmt: skip
EVIL = "".join(HOSTILE)


class Tags(HTMLParser):
    """The elements of a page, with their texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.tags[-1][0] if self.tags else "", data))


def page(*sources: Path, output: Path | None = None) -> str:
    second = sources[1] if len(sources) > 1 else None
    return write_report(sources[0], output, second=second).read_text(encoding="utf-8")


def answers(*sources: Path) -> dict[str, Any]:
    return answers_of(page(*sources))


def shown(found: dict[str, Any], run: int = 0) -> list[dict[str, Any]]:
    """The conversations of a report."""
    return [answer for name, answer in found.items() if name.startswith(f"conversation/{run}/")]


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


def test_the_page_refers_to_nothing_outside_and_runs_its_own_script_alone(make_finished_run: MakeRun) -> None:
    text = page(make_finished_run())
    found = Tags(text)
    for tag, attributes in found.tags:
        assert not {"src", "srcset", "action", "data", "poster", "style"} & set(attributes), (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#"), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "img")
    (style,) = re.findall("<style>(.*?)</style>", text, re.DOTALL)
    (script,) = re.findall('<script type="module">(.*?)</script>', text, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style
    assert not re.findall(r"^(?:import|export) ", script, re.MULTILINE)
    digests = [
        f"sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}"
        for each in (script, style)
    ]
    metas = [attributes for tag, attributes in found.tags if tag == "meta" and "http-equiv" in attributes]
    assert [meta["content"] for meta in metas] == [
        f"default-src 'none'; script-src '{digests[0]}'; style-src '{digests[1]}'; base-uri 'none'; form-action 'none'"
    ]


@given(
    st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=9)
)
def test_no_text_can_end_the_data_and_ordinary_text_comes_through(value: Any) -> None:
    text = embedded_json(value)
    text.encode("utf-8")
    assert not set("<>&\u2028\u2029\u202e\x1b") & set(text)

    def safe(each: Any) -> Any:
        if isinstance(each, dict):
            return {printable(key): safe(item) for key, item in each.items()}
        return [safe(item) for item in each] if isinstance(each, list) else printable(each)

    assert json.loads(text) == safe(value)


def test_hostile_text_in_every_field_stays_text(
    make_finished_run: MakeRun, transcript: MakeLine, critique_transcript: MakeLine, turn: MakeLine
) -> None:
    fields = dict.fromkeys(("reflection", "evaluation", "solution"), EVIL)
    turns = [turn(agent, 0, EVIL, prompt=EVIL, text=EVIL, response=fields) for agent in range(3)]
    said = transcript(
        0, 0, question=EVIL, answer=EVIL, tags=[EVIL], turns=turns, void=True, void_reason=EVIL,
        failures=[{"agent_id": 1, "round_index": 0, "reason": EVIL}],
        comparisons=[{"first": 0, "second": 1, "outcome": EVIL, "score": None, "text": EVIL}],
    )  # fmt: skip
    review = critique_transcript(1, 0, rules={EVIL: EVIL})
    for each in review["record"]["turns"]:
        each["segment"] = f"{EVIL} {each['segment']}"
        for critique in each["response"].get("critiques") or ():
            critique["text"] = EVIL
        if "dropped" in each["response"]:
            each["response"]["dropped"] = {EVIL: 1}
    review["record"]["streams"] = {"0": {EVIL: 0.5}}
    metrics = [{"step": step, EVIL: 1.0, f"agent_0/{EVIL}": 2.0, f"{EVIL}/{EVIL}": 3.0} for step in range(2)]
    text = page(
        make_finished_run(
            metrics=metrics, transcripts=[said, review], config={EVIL: EVIL, "model_name": EVIL}
        )
    )
    tame = page(make_finished_run(name="tame"))
    assert [tag for tag, _ in Tags(text).tags] == [tag for tag, _ in Tags(tame).tags]
    assert not set("\u202e\x00\x07\x1b") & set(text)
    found = answers_of(text)
    told = json.dumps(found, ensure_ascii=False)
    assert told.count("<script>alert(1)</script>") > 50
    assert "\\\\u202e gnp.exe" in told
    assert "\u2400\u2407\u241b[31m" in told
    assert len(shown(found)) == 2


def test_broken_surrogates_and_a_megabyte_reply_make_a_small_page(
    make_finished_run: MakeRun, transcript: MakeLine, turn: MakeLine
) -> None:
    long = "x" * 1_000_000
    lines = [transcript(0, 0, turns=[turn(0, 0, "\ud800 half"), turn(1, 0, long, text=long, prompt=long)])]
    folder = make_finished_run(transcripts=lines)
    text = page(folder)
    assert "\ufffd half" in text
    assert text.count('"left_out":994500') == 3
    assert (folder / "report.html").stat().st_size < 200_000


def test_long_turns_lose_their_last_tokens_and_long_contexts_their_middle(make_finished_run: MakeRun) -> None:
    folder = make_finished_run()
    count = 1600
    columns = ("ids", "sampling", "training", "anchor", "weights", "mask", "advantages")
    long = {name: [1] * count for name in columns} | {"pieces": ["a"] * count, "sampled_in": "y" * 9000}
    row = tokens(0, 0)
    row["turns"][0] |= long
    (folder / "tokens.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = [each["tokens"] for each in shown(answers(folder)) if each["tokens"]]
    first, second = found["turns"]
    assert {len(first[name]) for name in (*columns, "pieces", "ratios")} == {1500}
    assert (first["left_out"], second["left_out"]) == (100, 0)
    assert "[3,500 characters left out]" in first["sampled_in"]
    assert second["trained_in"] == "Problem alone"


def test_numbers_of_the_page_are_those_of_the_files(make_finished_run: MakeRun) -> None:
    folder = make_finished_run()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (series,) = answers(folder)["series"]
    for key in rows[0]:
        if key != "step":
            points = [(row["step"], row[key]) for row in rows if key in row]
            found = series[key]
            assert list(zip(found["steps"], found["values"], strict=True)) == points, key
            assert found["count"] == len(points)
    keys = [
        curve["key"]
        for group in answers(folder)["curves"]
        for section in group["sections"]
        for chart in section["charts"]
        for curve in chart["curves"]
    ]
    assert sorted(keys) == sorted({*rows[0]} - {"step", "test/direct_accuracy_stderr"})


@pytest.mark.parametrize("missing", ["transcripts", "config", "metrics"])
def test_a_run_with_a_piece_missing_still_has_a_page(make_finished_run: MakeRun, missing: str) -> None:
    rows: list[dict[str, Any]] = []
    found = answers(make_finished_run(**{missing: rows if missing == "metrics" else None}))
    (run,) = found["runs"]["runs"]
    there = {"transcripts": shown(found), "config": run["config"], "metrics": found["curves"]}
    assert [name for name, pieces in there.items() if not pieces] == [missing]


def test_a_torn_last_line_is_left_out_and_said_so(make_finished_run: MakeRun) -> None:
    folder = make_finished_run()
    for name, line in (("metrics.jsonl", '{"step": 31, "rew'), ("tokens.jsonl", '{"step": 4, "gro')):
        with (folder / name).open("a") as file:
            file.write(line)
    found = answers(folder)
    assert found["summary"][0]["torn"] == ["metrics.jsonl", "tokens.jsonl"]
    assert found["runs"]["runs"][0]["problems"] == []


def test_damaged_lines_are_named_and_left_out(make_finished_run: MakeRun, transcript: MakeLine) -> None:
    folder = make_finished_run(
        transcripts=[transcript(0, 0), {"step": 0, "group": 1, "record": {"turns": 3}}]
    )
    found = answers(folder)
    (problem,) = found["runs"]["runs"][0]["problems"]
    assert "transcripts.jsonl:2: not a transcript: record." in problem
    assert [(each["step"], each["group"]) for each in shown(found)] == [(0, 0)]


def test_a_conversation_that_cannot_have_been_held_is_named(
    make_finished_run: MakeRun, critique_transcript: MakeLine
) -> None:
    folder = make_finished_run(transcripts=[critique_transcript(0, group) for group in range(2)])
    row = tokens(0, 0)
    row["turns"][0]["mask"] = [1]
    (folder / "tokens.jsonl").write_text(json.dumps(row) + "\n")
    found = answers(folder)
    (problem,) = found["runs"]["runs"][0]["problems"]
    assert "step 0, group 0 cannot be shown: a turn of tokens.jsonl needs one value per token" in problem
    assert found["conversation/0/0/0"]["error"] == problem


def test_a_sample_of_conversations_stands_in_the_order_in_which_it_is_worth_reading(
    make_finished_run: MakeRun,
) -> None:
    found = answers(make_finished_run())
    listed = found["conversations/0"]
    assert (listed["all"], listed["total"]) == (60, len(listed["rows"]))
    assert listed["rows"][0]["reason"] == "the first conversation of the run"
    assert listed["rows"][-1]["reason"] == "a conversation in which an agent failed"
    places = [[row["step"], row["group"]] for row in listed["rows"]]
    assert [each["previous"] for each in shown(found)] == [None, *places[:-1]]
    assert [each["next"] for each in shown(found)] == [*places[1:], None]
    (failed,) = [each for each in shown(found) if each["void"]]
    assert failed["record"]["failures"][0]["reason"] == "TimeoutError: no reply within 60 s"


def test_transcripts_without_a_record_are_counted_and_not_shown(make_finished_run: MakeRun) -> None:
    lines = [{"step": 0, "group": group, "void": False, "rewards": [0.5, None]} for group in range(3)]
    found = answers(make_finished_run(transcripts=lines))
    assert (found["conversations/0"]["all"], shown(found)) == (3, [])


def test_the_same_files_give_the_same_bytes_and_no_litter(make_finished_run: MakeRun) -> None:
    folder = make_finished_run()
    first = write_report(folder).read_bytes()
    assert write_report(str(folder), folder / "again.html").read_bytes() == first
    assert sorted(path.name for path in folder.iterdir()) == [
        "again.html", "config.json", "metrics.jsonl", "report.html", "transcripts.jsonl",
    ]  # fmt: skip


def test_no_page_is_left_half_written(make_finished_run: MakeRun) -> None:
    folder = make_finished_run()
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config\\.json"):
        write_report(folder)
    assert not list(folder.glob("report*"))


def test_the_judge_is_summed_up_over_all_conversations_not_only_those_shown(
    make_finished_run: MakeRun, transcript: MakeLine
) -> None:
    lines = [transcript(step, group) for step in range(4) for group in range(50)]
    judge = answers(make_finished_run(transcripts=lines))["judge/0"]
    # of every conversation: agents 0 and 1 each win when they are shown first
    assert (judge["totals"]["conversations"], judge["totals"]["flips"]) == (200, 200)
    assert judge["totals"]["orders"][0] == 200
    assert (judge["total"], len(judge["rows"]), len(judge["steps"])) == (200, 30, 4)


def test_evaluations_in_the_folder_of_the_run_are_there_with_their_intervals(
    make_finished_run: MakeRun,
) -> None:
    folder = make_finished_run()
    write_result(folder / "eval")
    difference = {"value": 0.5, "against": 0.25, "difference": 0.25, "low": 0.125, "high": 0.375}
    write_result(
        folder / "eval", "b", format="viva comparison 1", first={"name": "x"}, second={"name": "y"},
        target=None, figures={"direct/avg@4": difference},
    )  # fmt: skip
    (found,) = answers(folder)["evaluations"]
    one, other = found["results"]
    assert (one["about"], other["about"]) == ("some run 000025", "x against y")
    assert one["figures"]["direct/avg@4"] == {
        "value": 0.5625,
        "low": 0.4375,
        "high": None,
        "num_problems": 97,
    }
    assert other["figures"] == {"direct/avg@4": difference}


def test_a_second_run_lies_over_the_first(make_finished_run: MakeRun) -> None:
    first = make_finished_run(name="one")
    second = make_finished_run(name="two", config={"seed": 5, "model_name": "tiny"})
    text = page(first, second)
    assert re.findall("<title>([^<]*)</title>", text) == ["one and two: Viva report"]
    found = answers_of(text)
    assert [run["name"] for run in found["runs"]["runs"]] == ["one", "two"]
    assert [run["config"].get("seed") for run in found["runs"]["runs"]] == [None, "5"]
    assert len(found["series"]) == len(found["summary"]) == 2
    assert shown(found, 1)
    assert found["judge/1"]["totals"]["conversations"] == 60
    assert not (second / "report.html").exists()


def test_a_result_of_viva_eval_has_a_report_of_its_own(
    tmp_path: Path, transcript: MakeLine, capsys: pytest.CaptureFixture[str]
) -> None:
    result = write_result(tmp_path / "results")
    lines = [json.dumps(transcript(0, group)) for group in range(3)]
    result.with_suffix(".transcripts.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["report", str(result)]) == 0
    path = tmp_path / "results" / "report.html"
    assert capsys.readouterr().out == f"{path}\n"
    found = answers_of(path.read_text(encoding="utf-8"))
    assert found["evaluations"][0]["results"][0]["about"] == "some run 000025"
    assert len(shown(found)) == 2  # the first, and the one with the fewest right
    assert found["judge/0"]["totals"]["flips"] == 3
    assert found["runs"]["runs"][0]["config"]["seed"] == "7"
    assert main(["report", str(tmp_path / "results"), "-o", str(tmp_path / "all.html")]) == 0
    assert "some run 000025" in (tmp_path / "all.html").read_text(encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 2
    assert "no results of viva eval" in capsys.readouterr().err


def test_other_rewards_stand_in_the_report_as_the_command_tells_them(
    make_finished_run: MakeRun, critique_transcript: MakeLine
) -> None:
    folder = make_finished_run(transcripts=[critique_transcript(0, group) for group in range(3)])
    found = answers(folder)["rewards/0"]
    told = rescore(folder, RescoreOptions(reward="all"))
    assert (found["used"], found["all"], found["left_out"]) == (3, 3, [])
    assert [row["reward"] for row in found["rows"]] == [each.reward for each in told.rows]
    rows = {row["reward"]: row for row in found["rows"]}
    assert rows["(paid)"]["mean"] == pytest.approx((1.57 + 1.75125 + 0.765) / 3)
    assert rows["answers"] == {
        "reward": "answers",
        "conversations": 3,
        "mean": pytest.approx(2 / 3),
        "spread": pytest.approx(told.rows[1].spread),
        "with_paid": pytest.approx(told.rows[1].with_paid),
        "with_truth": pytest.approx(1.0),
    }
    unpaid = {name: each["why"] for each in found["unpaid"] for name in each["rewards"].split(", ")}
    assert unpaid == told.unpaid
    assert "judge=... asks a judge anew" in unpaid["judge_answer"]


def test_of_a_long_run_the_last_conversations_are_used_and_damage_is_named(
    make_finished_run: MakeRun, transcript: MakeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_rewards, "MOST", 4)
    lines = [transcript(step, 0) for step in range(6)]
    lines[1]["record"]["comparisons"][0]["outcome"] = "C"  # not among the last
    lines[5]["record"]["comparisons"][0]["outcome"] = "C"
    found = answers(make_finished_run(transcripts=lines))["rewards/0"]
    assert (found["used"], found["all"]) == (4, 6)
    rows = {row["reward"]: row["conversations"] for row in found["rows"]}
    assert (rows["majority"], rows["tournament"]) == (3, 3)
    (why,) = [each["why"] for each in found["unpaid"] if "tournament" in each["rewards"].split(", ")]
    assert why == "'C' is not a valid Outcome"


def test_a_conversation_that_cannot_have_been_held_is_left_out_of_other_rewards(
    make_finished_run: MakeRun, critique_transcript: MakeLine
) -> None:
    whole, torn = critique_transcript(0, 0), critique_transcript(0, 1)
    torn["record"]["turns"] = [each for each in torn["record"]["turns"] if each["text"] != "proposal of 0"]
    found = answers(make_finished_run(transcripts=[whole, torn]))["rewards/0"]
    (why,) = found["left_out"]
    assert why.startswith("step 0, group 1: no such conversation can have been held (KeyError")
    assert {row["conversations"] for row in found["rows"]} == {1}


def test_without_conversations_there_are_no_other_rewards(
    make_finished_run: MakeRun, tmp_path: Path, transcript: MakeLine
) -> None:
    assert "rewards/0" not in answers(make_finished_run(transcripts=[], name="one"))
    void = [transcript(0, 0, void=True, rewards={})]
    assert "rewards/0" not in answers(make_finished_run(transcripts=void, name="two"))
    result = write_result(tmp_path / "results")
    result.with_suffix(".transcripts.jsonl").write_text(json.dumps(transcript(0, 0)) + "\n")
    assert "rewards/0" not in answers(result)  # an evaluation pays nobody
