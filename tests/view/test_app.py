"""The server: what it answers, and whom it refuses."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from view_runs import HOSTILE, transcript, turn, write_lines

from viva.view import other_rewards
from viva.view.app import CONTENT_POLICY, cookie_name, make_app

MakeRun = Callable[..., Path]

TOKEN = "secret-token"
PORT = 4321
COOKIE = {"Cookie": f"{cookie_name(TOKEN)}={TOKEN}"}


@asynccontextmanager
async def client(*folders: Path, headers: dict[str, str] | None = None) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=make_app(folders, token=TOKEN))
    base = f"http://127.0.0.1:{PORT}"
    async with httpx.AsyncClient(
        transport=transport, base_url=base, headers=COOKIE if headers is None else headers
    ) as made:
        yield made


async def ask(made: httpx.AsyncClient, path: str) -> Any:
    response = await made.get(path)
    assert response.status_code == 200, response.text
    return response.json()


async def read_all(made: httpx.AsyncClient) -> list[dict[str, Any]]:
    while True:
        runs = (await ask(made, "/api/runs"))["runs"]
        if all(run["is_complete"] for run in runs):
            return runs


async def test_without_the_token_nothing_is_told(make_run: MakeRun) -> None:
    async with client(make_run(), headers={}) as made:
        for path in ("/", "/static/app.js", "/api/runs", "/?token=wrong"):
            assert (await made.get(path)).status_code == 403
        for cookie in (f"{cookie_name(TOKEN)}=wrong", "viva-9=secret-token", "\x00;=;", cookie_name(TOKEN)):
            assert (await made.get("/api/runs", headers={"Cookie": cookie})).status_code == 403


async def test_the_address_with_the_token_becomes_a_cookie_that_scripts_cannot_read(
    make_run: MakeRun,
) -> None:
    async with client(make_run(), headers={}) as made:
        answer = await made.get(f"/?token={TOKEN}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert (await made.get("/")).status_code == 200


async def test_through_a_tunnel_with_another_port_the_page_and_its_cookie_work(make_run: MakeRun) -> None:
    for host in ("127.0.0.1:9000", "localhost:9000", "[::1]:9000", "localhost"):
        async with client(make_run(host.strip("[]:19")), headers={"Host": host}) as made:
            assert (await made.get("/api/runs")).status_code == 403
            answer = await made.get(f"/?token={TOKEN}")
            assert answer.status_code == 303
            cookie = {"Cookie": answer.headers["set-cookie"].partition(";")[0]}
            same = {"Sec-Fetch-Site": "same-origin", "Origin": f"http://{host}"}
            assert (await made.get("/api/runs", headers=cookie | same)).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:4321", "evil.example", "", "localhost.evil.example:4321", "127.0.0.1.evil.example", "localhost.",
        "127.0.0.1:4321@evil.example", "127.0.0.1:", "192.168.0.7:4321", "0.0.0.0:4321", "127.0.0.1:4321 evil.example",
    ],
)  # fmt: skip
async def test_a_foreign_host_name_is_refused_even_with_the_token(make_run: MakeRun, host: str) -> None:
    async with client(make_run()) as made:
        assert (await made.get("/api/runs", headers={"Host": host})).status_code == 403


async def test_other_sites_and_other_methods_are_refused(make_run: MakeRun) -> None:
    async with client(make_run()) as made:
        for site in ("cross-site", "same-site"):
            assert (await made.get("/api/runs", headers={"Sec-Fetch-Site": site})).status_code == 403
        for origin in ("http://evil.example", "http://127.0.0.1:9", f"https://127.0.0.1:{PORT}", "null"):
            assert (await made.get("/api/runs", headers={"Origin": origin})).status_code == 403
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        assert (await made.get("/", headers=link)).status_code == 200
        assert (await made.post("/api/runs")).status_code == 405


async def test_every_answer_carries_a_strict_policy(make_run: MakeRun) -> None:
    async with client(make_run()) as made:
        for path in ("/", "/static/app.js", "/api/runs", "/api/nothing"):
            headers = (await made.get(path)).headers
            assert headers["content-security-policy"] == CONTENT_POLICY
            assert headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in CONTENT_POLICY
    assert "http" not in CONTENT_POLICY


@pytest.mark.parametrize(
    "name", ["../guard.py", "%2e%2e/app.py", "nothing.js", "%2e%2e", "app.js%00", "/etc/passwd"]
)
async def test_only_files_of_the_page_are_served(make_run: MakeRun, name: str) -> None:
    async with client(make_run()) as made:
        assert (await made.get(f"/static/{name}")).status_code == 404


async def test_runs_tell_what_they_are_and_curves_come_in_groups(make_run: MakeRun) -> None:
    async with client(make_run(), make_run("run-b", shift=0.1)) as made:
        first, second = await read_all(made)
        assert (first["name"], second["name"], first["steps"], first["conversations"]) == (
            "run-a",
            "run-b",
            6,
            24,
        )
        assert first["config"]["model_name"] == "tiny"
        groups = await ask(made, "/api/curves")
        assert [group["name"] for group in groups] == [
            "learning",
            "rewards",
            "judge health",
            "ratios per strategy",
            "speed",
        ]
        strategies = groups[3]["sections"][0]["charts"]
        assert [[curve["name"] for curve in each["curves"]] for each in strategies] == [["feedback", "iid"]]
        both = await ask(made, "/api/series?key=test/direct_accuracy&key=no/such")
        assert [list(run) for run in both] == [["test/direct_accuracy"]] * 2
        assert both[1]["test/direct_accuracy"]["values"][0] == pytest.approx(0.5)
        assert both[0]["test/direct_accuracy"]["band"][0] == pytest.approx(1.96 * 0.02, rel=1e-3)


async def test_runs_of_one_name_are_told_apart_by_the_folders_above(
    make_run: MakeRun, tmp_path: Path
) -> None:
    (tmp_path / "seed-1").mkdir()
    one, other = make_run("run"), make_run("seed-1/run")
    async with client(one, other) as made:
        assert [run["name"] for run in await read_all(made)] == [f"{tmp_path.name}/run", "seed-1/run"]


async def test_conversations_are_filtered_and_paged_and_know_their_neighbours(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("viva.view.app._PAGE_SIZE", 5)
    async with client(make_run()) as made:
        await read_all(made)
        page = await ask(made, "/api/conversations?page=1")
        assert (page["total"], next((row["step"], row["group"]) for row in page["rows"])) == (24, (1, 1))
        found = await ask(made, "/api/conversations?strategy=feedback&step_from=2&step_to=3")
        assert [(row["step"], row["group"]) for row in found["rows"]] == [(2, 2), (3, 2)]
        one = await ask(made, "/api/conversation?step=2&group=2&strategy=feedback")
        assert (one["previous"], one["next"]) == ([1, 2], [3, 2])
        assert (await made.get("/api/conversation?step=77&group=0")).status_code == 404
        for wrong in (
            "/api/conversations?answers=nope",
            "/api/conversation?step=-1&group=0",
            "/api/conversations?page=x",
            f"/api/conversations?step_from={'9' * 400}",
        ):
            answer = await made.get(wrong)
            assert (answer.status_code, "must be" in answer.json()["error"]) == (400, True)


async def test_what_a_turn_saw_and_what_was_hidden_from_it_is_told(make_run: MakeRun) -> None:
    async with client(make_run()) as made:
        await read_all(made)
        turns = (await ask(made, "/api/conversation?step=0&group=0"))["record"]["turns"]
        assert turns[0]["sightings"] == []
        ranking = next(each for each in turns if each["segment"] == "ranking" and each["agent_id"] == 0)
        assert [each["turn"] for each in ranking["sightings"] if each["is_seen"]] == [0, 1, 2]
        told = turns[-1]["sightings"]
        assert [(each["turn"], each["part"]) for each in told if each["is_seen"]] == [
            (2, "solution"),
            (6, "critique of agent 2"),
        ]
        assert {each["turn"] for each in told if not each["is_seen"]} == {0, 1, 3, 4, 5, 7, 8}


async def test_verdicts_flips_cycles_and_agreement_are_worked_out(make_run: MakeRun) -> None:
    async with client(make_run()) as made:
        await read_all(made)
        record = (await ask(made, "/api/conversation?step=0&group=1"))["record"]
        assert [pair["items"] for pair in record["pairs"] if pair["is_flipped"]] == [[0, 1]]
        judge, ranking = record["verdicts"]
        assert judge["agreement"] == [2, 4]
        assert (ranking["segment"], ranking["cycles"]) == ("ranking", [[0, 1, 2]])
        judge = await ask(made, "/api/judge?step_to=1")
        assert (judge["totals"]["conversations"], judge["totals"]["flips"], judge["totals"]["pairs"]) == (
            8,
            8,
            24,
        )
        assert [step["step"] for step in judge["steps"]] == [0, 1]


async def test_tokens_come_with_ratio_weight_mask_and_the_turn_they_belong_to(make_run: MakeRun) -> None:
    async with client(make_run()) as made:
        await read_all(made)
        tokens = (await ask(made, "/api/conversation?step=1&group=0"))["tokens"]
        assert tokens["streams"] == ["r_diag", "r_sol"]
        first, swapped = tokens["turns"]
        assert (first["place"], first["title"]) == (0, "agent 0, round 1: proposal")
        assert (swapped["place"], swapped["title"]) == (4, "agent 0, round 2: critique")
        assert first["ratios"] == [1.0, pytest.approx(0.7788, rel=1e-3), None]
        assert (swapped["sampled_in"], swapped["trained_in"]) == ("Problem and a hint", "Problem alone")
        assert (await ask(made, "/api/conversation?step=1&group=1"))["tokens"] is None


async def test_a_text_of_a_megabyte_is_cut_and_whole_on_request(make_run: MakeRun) -> None:
    long = "x" * 500_000 + "needle" + "y" * 500_000
    row = transcript(0, 0, turns=[turn(0, 0, "proposal", {"solution": long}, text=long)])
    async with client(make_run(transcripts=[row])) as made:
        await read_all(made)
        answer = await made.get("/api/conversation?step=0&group=0")
        assert len(answer.content) < 50_000
        said = answer.json()["record"]["turns"][0]["text"]
        assert said["left_out"] > 990_000
        whole = await ask(made, f"/api/text?step=0&group=0&ref={said['ref']}")
        assert whole["text"] == long
        for ref in (
            "record",
            "record.turns.9.text",
            "step",
            "record.turns.-1.text",
            "a.b.c.d.e.f.g.h.i.j",
            "",
        ):
            assert (await made.get(f"/api/text?step=0&group=0&ref={ref}")).status_code == 400


async def test_hostile_text_arrives_as_text_with_its_control_characters_shown(make_run: MakeRun) -> None:
    row = transcript(0, 0, question=HOSTILE, tags=[HOSTILE], strategy=HOSTILE)
    folder = make_run(transcripts=[row])
    async with client(folder) as made:
        await read_all(made)
        answer = await ask(made, "/api/conversation?step=0&group=0")
        question = answer["record"]["question"]
        assert "<script>" in question
        assert "\u202e" not in json.dumps(answer, ensure_ascii=False)
        assert "\x1b" not in question
        write_lines(
            folder / "transcripts.jsonl", [{"step": 0, "group": 1, "record": {"question": 1, "turns": "no"}}]
        )
        await read_all(made)
        assert (await made.get("/api/conversation?step=0&group=1")).status_code in (400, 404)


async def test_results_of_viva_eval_are_listed_and_other_files_are_not(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "eval").mkdir()
    target = {"name": HOSTILE, "kind": "run", "checkpoint": "000017"}
    figure = {"value": 0.5, "low": 0.4, "high": None, "num_problems": 100}
    result = {"format": "viva evaluation 1", "target": target, "figures": {"avg@1": figure}}
    difference = {"value": 0.5, "against": 0.25, "difference": 0.25, "low": 0.125, "high": 0.375}
    compared = {
        "format": "viva comparison 1",
        "first": target,
        "second": target,
        "figures": {"avg@1": difference},
    }
    for name, content in (
        ("000017-a", result),
        ("000017-b", compared),
        ("other", {"format": "else"}),
        ("list", []),
    ):
        (folder / "eval" / f"{name}.json").write_text(json.dumps(content))
    async with client(folder, make_run("run-b")) as made:
        first, second = await ask(made, "/api/evaluations")
    assert [each["kind"] for each in first["results"]] == ["evaluation", "comparison"]
    assert first["results"][0]["figures"] == {"avg@1": figure}
    assert first["results"][1]["figures"] == {"avg@1": difference}
    assert "\u202e" not in first["results"][0]["about"]
    assert second["results"] == []


async def test_other_rewards_are_computed_when_somebody_asks_and_anew_where_the_run_went_on(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    compute = other_rewards.other_rewards

    def counting(stored: other_rewards.Stored) -> dict[str, object]:
        calls.append(stored.num_used)
        return compute(stored)

    monkeypatch.setattr(other_rewards, "other_rewards", counting)
    folder = make_run(steps=2)
    async with client(make_run("run-b", steps=1), folder) as made:
        await read_all(made)
        assert calls == []
        first = await ask(made, "/api/rewards?run=1")
        assert await ask(made, "/api/rewards?run=1") == first
        assert calls == [first["used"]]
        write_lines(folder / "transcripts.jsonl", [transcript(2, 0)])
        await read_all(made)
        again = await ask(made, "/api/rewards?run=1")
        assert (again["used"], calls) == (first["used"] + 1, [first["used"], again["used"]])
        assert (await ask(made, "/api/rewards"))["all"] < first["all"]
        assert (await made.get("/api/rewards?run=2")).status_code == 404
    rows = {row["reward"]: row for row in again["rows"]}
    assert rows["majority"]["conversations"] == again["used"]


async def test_files_that_vanish_are_told_of_and_break_nothing(make_run: MakeRun) -> None:
    folder = make_run()
    async with client(folder) as made:
        await read_all(made)
        (folder / "transcripts.jsonl").unlink()
        for path in ("conversation?step=0&group=0", "text?step=0&group=0&ref=record.question"):
            answer = await made.get(f"/api/{path}")
            assert (answer.status_code, "cannot be read" in answer.json()["error"]) == (410, True)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        for path in ("runs", "curves", "series?key=reward/mean", "conversations", "judge", "evaluations"):
            assert (path, (await made.get(f"/api/{path}")).status_code) == (path, 200)


async def test_a_model_in_a_file_is_shown_by_its_name_and_its_whole_path_among_the_options(
    make_run: MakeRun,
) -> None:
    run = make_run()
    (run / "config.json").write_text(json.dumps({"model_name": "/models/of/mine/small.gguf", "seed": 0}))
    async with client(run) as made:
        (shown,) = await read_all(made)
    assert shown["model"] == "small.gguf"
    assert shown["config"]["model_name"] == "/models/of/mine/small.gguf"


async def test_results_of_viva_eval_are_sources_of_their_own(tmp_path: Path, make_run: MakeRun) -> None:
    target = {"name": "tiny", "kind": "model", "model": "some/model", "checkpoint": None}
    figure = {"value": 0.5, "low": 0.4, "high": None, "num_problems": 100}
    result = {
        "format": "viva evaluation 1",
        "target": target,
        "options": {"seed": 1},
        "figures": {"avg@1": figure},
    }
    paths = [tmp_path / "results" / f"tiny-{name}.json" for name in ("a", "b", "c")]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_text(json.dumps(result))
    write_lines(paths[1].with_suffix(".transcripts.jsonl"), [transcript(0, group) for group in range(3)])
    async with client(make_run(), *paths, paths[0].parent) as made:
        runs = await read_all(made)
        assert [run["kind"] for run in runs] == ["run", "result", "result", "result", "results"]
        assert [run["conversations"] for run in runs] == [24, 0, 3, 0, 0]
        assert runs[1]["model"] == "some/model"
        assert runs[1]["config"]["seed"] == "1"
        assert (await ask(made, "/api/conversations?run=2"))["total"] == 3
        assert (await ask(made, "/api/conversation?run=2&step=0&group=1"))["record"]["agent_ids"]
        shown = await ask(made, "/api/evaluations")
        assert [[each["name"] for each in run["results"]] for run in shown] == [
            [], ["tiny-a"], ["tiny-b"], ["tiny-c"], ["tiny-a", "tiny-b", "tiny-c"],
        ]  # fmt: skip
